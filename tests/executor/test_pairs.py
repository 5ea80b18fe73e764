"""A pair folder is checked before anything is loaded; every complaint names the file or the token."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor.pairs import load_pair
from sim.errors import BadInput
from tests.executor.tiny_models import VOCAB_SIZE, llama, save_pair, save_tokenizer, token_names

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tiny_pair, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_pair.folder, tmp_path / "pair"))


def give_each_role_a_tokenizer(folder: Path, draft_tokens: list[str]) -> None:
    (folder / "tokenizer.json").unlink()
    save_tokenizer(folder / "target" / "tokenizer.json", token_names())
    save_tokenizer(folder / "draft" / "tokenizer.json", draft_tokens)


@pytest.mark.parametrize(
    "file",
    [
        "target/config.json",
        "target/model.safetensors",
        "draft/config.json",
        "draft/model.safetensors",
    ],
)
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(BadInput, match=f"{file}: this file of the pair is missing"):
        load_pair(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"target/tokenizer.json: this file of the pair is missing"):
        load_pair(folder)


def test_missing_prompts_are_named_when_asked_for(folder: Path) -> None:
    (folder / "prompts.jsonl").unlink()
    with pytest.raises(BadInput, match=r"prompts.jsonl: this file of the pair is missing"):
        load_pair(folder).prompts("test", 1, 1)


def test_an_unknown_pair_is_named_beside_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"pair: must be a folder or a packaged pair \(.*stdlib.*\), got 'stdlibb'"):
        load_pair("stdlibb")


@pytest.mark.parametrize("file", ["target/config.json", "tokenizer.json"])
def test_a_file_that_is_not_json_is_named(folder: Path, file: str) -> None:
    (folder / file).write_text("{")
    with pytest.raises(BadInput, match=f"{file}: must be "):
        load_pair(folder)


def test_a_damaged_prompt_line_is_named(folder: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('\n{"text": "t1"}')
    with pytest.raises(BadInput, match=r"prompts.jsonl, line 4: must be JSON"):
        load_pair(folder).prompts("test", 1, 1)


def test_equal_tokenizers_in_both_roles_are_accepted(folder: Path) -> None:
    give_each_role_a_tokenizer(folder, token_names())
    assert load_pair(folder).prompts("test", 2, 1) == ((1,), (2,))


def test_a_draft_tokenizer_beside_a_shared_one_is_compared(folder: Path) -> None:
    swapped = token_names()
    swapped[40], swapped[90] = swapped[90], swapped[40]
    give_each_role_a_tokenizer(folder, swapped)
    (folder / "target" / "tokenizer.json").rename(folder / "tokenizer.json")
    with pytest.raises(BadInput, match=r"draft/tokenizer.json: must be that of tokenizer.json: id 40 is 't40' there"):
        load_pair(folder)


def test_a_tokenizer_with_two_ids_swapped_is_refused(folder: Path) -> None:
    swapped = token_names()
    swapped[40], swapped[90] = swapped[90], swapped[40]
    give_each_role_a_tokenizer(folder, swapped)
    with pytest.raises(
        BadInput, match=r"draft/tokenizer.json: must be that of target/tokenizer.json: id 40 is 't40' there, got 't90'"
    ):
        load_pair(folder)


def test_a_tokenizer_with_more_ids_than_the_models_is_refused(folder: Path) -> None:
    save_tokenizer(folder / "tokenizer.json", token_names(VOCAB_SIZE + 1))
    with pytest.raises(BadInput, match=f"below the models' vocab_size {VOCAB_SIZE}, got {VOCAB_SIZE}"):
        load_pair(folder)


def test_different_vocabulary_sizes_are_refused(tmp_path: Path) -> None:
    folder = save_pair(tmp_path / "pair", llama(1, seed=0), llama(1, seed=0, vocab_size=136))
    with pytest.raises(BadInput, match="vocab_size must equal the target's 128, got 136"):
        load_pair(folder)


def test_prompts_are_cut_and_counted(folder: Path) -> None:
    rows = [{"text": text, "split": "test"} for text in ("t1", "t2", "t3")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair = load_pair(folder)
    assert pair.prompts("test", 2, 1) == ((1,), (2,))
    with pytest.raises(BadInput, match="must hold 1 test prompts of 2 tokens, got 0"):
        pair.prompts("test", 1, 2)
    with pytest.raises(BadInput, match="split: must be one of calibration, test, got 'train'"):
        pair.prompts("train", 1, 1)


def test_hashes_speak_of_the_content(tiny_pair, folder: Path) -> None:
    assert load_pair(folder).hashes == tiny_pair.hashes
    save_tokenizer(folder / "tokenizer.json", [*token_names(VOCAB_SIZE - 1), "other"])
    changed = load_pair(folder).hashes
    assert {name for name in changed if changed[name] != tiny_pair.hashes[name]} == {"tokenizer"}


def test_a_damaged_weights_file_is_named(folder: Path) -> None:
    (folder / "draft" / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(BadInput, match=r"draft: .*cannot be loaded"):
        load_pair(folder).load("draft")


def test_models_load_in_the_precision_asked_for(tiny_pair) -> None:
    for dtype in ("float32", "float64"):
        assert tiny_pair.load("draft", dtype).dtype is getattr(torch, dtype)


def test_what_a_checkpoint_says_about_sampling_is_ignored(folder: Path) -> None:
    """A generation_config.json beside the weights changes nothing: only the workload's temperature processes logits."""
    tokens = [3, 1, 4, 1, 5]
    expected = load_pair(folder).load("target", "float64").append(tokens)
    settings = {"do_sample": True, "top_k": 5, "temperature": 0.5, "repetition_penalty": 1.3}
    (folder / "target" / "generation_config.json").write_text(json.dumps(settings))
    assert torch.equal(load_pair(folder).load("target", "float64").append(tokens), expected)


def test_describing_a_pair_needs_no_torch() -> None:
    program = (
        "import sys; from executor.pairs import load_pair; pair = load_pair('stdlib');"
        "pair.prompts('test', 2, 16), pair.hashes, pair.stop_ids, pair.max_positions; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"
