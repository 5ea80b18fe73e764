"""A pair folder is checked before anything is loaded; every complaint names the file or the token."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.pairs import load_pair
from executor.synthetic_pair import SyntheticPair
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
    with pytest.raises(BadInput, match=r"pair: must be a folder, a packaged pair \(.*stdlib.*\) or .*, got 'stdlibb'"):
        load_pair("stdlibb")
    for nothing in ("", None, 3):
        with pytest.raises(BadInput, match="pair: must be a name or a folder"):
            load_pair(nothing)


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


def test_another_tokenizer_is_taken_with_a_warning_if_asked_for(folder: Path) -> None:
    swapped = token_names()
    swapped[40], swapped[90] = swapped[90], swapped[40]
    give_each_role_a_tokenizer(folder, swapped)
    with pytest.warns(UserWarning, match=r"ANOTHER TOKENIZER: .*id 40 is 't40' there and 't90' here, as are 2 ids"):
        pair = load_pair(folder, allow_other_tokenizer=True)
    assert pair.vocab_size == VOCAB_SIZE


def test_an_id_that_one_tokenizer_lacks_is_no_difference(folder: Path) -> None:
    give_each_role_a_tokenizer(folder, token_names(VOCAB_SIZE - 2))
    pair = load_pair(folder)
    assert pair.vocab_size == VOCAB_SIZE
    assert pair.unused_ids("target") == set()
    assert pair.unused_ids("draft") == {VOCAB_SIZE - 2, VOCAB_SIZE - 1}
    (folder / "target" / "tokenizer.json").write_bytes((folder / "draft" / "tokenizer.json").read_bytes())
    assert load_pair(folder).vocab_size == VOCAB_SIZE - 2


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_lacks_an_id_of_the_tokenizer_is_refused(tmp_path: Path, role: str) -> None:
    sizes = {"target": VOCAB_SIZE, "draft": VOCAB_SIZE} | {role: VOCAB_SIZE - 1}
    models = [llama(1, seed=0, vocab_size=size) for size in sizes.values()]
    with pytest.raises(BadInput, match=f"{role}/config.json: vocab_size must cover the 128 ids of the tok.*, got 127"):
        load_pair(save_pair(tmp_path / "pair", *models))


def test_a_model_in_parts_is_found_and_hashed(tiny_pair, folder: Path) -> None:
    state = load_file(folder / "draft" / "model.safetensors")
    half = len(state) // 2
    parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / "draft" / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
    (folder / "draft" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "draft" / "model.safetensors").unlink()
    pair = load_pair(folder)
    assert pair.hashes["draft"] != tiny_pair.hashes["draft"]
    logits = [p.load("draft", "float64").append([1, 2, 3]) for p in (pair, tiny_pair)]
    assert torch.equal(*logits)


def test_what_config_json_must_state_is_named(folder: Path) -> None:
    config = json.loads((folder / "draft" / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"draft/config.json: must state max_position_embeddings"):
        _ = load_pair(folder).max_positions


def test_prompts_are_cut_and_counted(folder: Path) -> None:
    rows = [{"text": text, "split": "test"} for text in ("t1", "t2", "t3")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair = load_pair(folder)
    assert pair.prompts("test", 2, 1) == ((1,), (2,))
    with pytest.raises(BadInput, match="must hold 1 test prompts of 2 tokens, got 0"):
        pair.prompts("test", 1, 2)
    with pytest.raises(BadInput, match="split: must be one of calibration, test, got 'train'"):
        pair.prompts("train", 1, 1)
    for asked in (pair, SyntheticPair(2, 16, 2, 1, 24, 32, draft_layers=1)):
        for num, num_tokens in ((-1, 1), (1, 0), ("1", 1), (1, True)):
            with pytest.raises(BadInput, match=r"prompts: num\w*: must be an integer >= "):
                asked.prompts("test", num, num_tokens)


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
        "pair.prompts('test', 2, 16), pair.hashes, pair.stop_ids, pair.max_positions, pair.vocab_size;"
        "load_pair('synthetic:layers=1,hidden_size=8,num_heads=2,num_key_value_heads=1,intermediate_size=8,vocab_size=9,"
        "draft_layers=1').prompts('test', 2, 16); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"
