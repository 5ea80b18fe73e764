"""An audited run passes, and ends at the first round whose KV cache holds anything but what was committed."""

import pytest
import torch

from executor.concurrency import Runner
from executor.drafting import Drafter
from executor.execute import execute
from executor.kv_cache import KvCacheCorrupt, SlotCache
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.serial_draft import SerialDraft
from executor.target import Target
from executor.toy_model import FakePair
from sim.policy import Autoregressive, Speculative
from sim.trace import Lane
from sim.workload import Workload
from tests.executor.test_loops import ssd, texts
from tests.executor.tiny_models import FAMILIES, gpt2, llama, prompts

RULES = Workload("test", (prompts(1, 9)[0], prompts(1, 3)[0], prompts(1, 6)[0]), 24, batch_size=3)
POLICIES = [Autoregressive(), Speculative(3), ssd(3)]


def runner(family=llama):
    """The draft agrees with the target about half the time."""
    target, draft = family(2, seed=0), family(1, seed=1)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    roles = Target(LanguageModel(target), Recorder(Lane.TARGET)), SerialDraft(LanguageModel(draft))
    return Runner(FakePair(vocab_size=128, max_positions=256), "serial", *roles, {})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_right_passes(family: str) -> None:
    own = runner(FAMILIES[family])
    expected = texts(execute(Autoregressive(), RULES, own))
    for policy in POLICIES:
        assert texts(execute(policy, RULES, own, audit=True)) == expected


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.name)
def test_a_roll_back_that_keeps_too_much_is_caught(policy, monkeypatch) -> None:
    honest = SlotCache.roll_back

    def keeps_one_more(cache, length, row=0):
        honest(cache, min(length + 1, cache.lengths[row]), row)

    monkeypatch.setattr(SlotCache, "roll_back", keeps_one_more)
    with pytest.raises(KvCacheCorrupt, match=r"holds \d+ slots of"):
        execute(policy, RULES, runner(), audit=True)


def test_a_draft_whose_last_accepted_token_was_never_fed_is_caught(monkeypatch) -> None:
    honest = Drafter.commit

    def skips(drafter, row, tokens):
        """After full acceptance: claims that all is there, which takes what the slot held before for it."""
        honest(drafter, row, tokens)
        model, committed = drafter.model, drafter.committed[row]
        if model.length_of(row) == len(committed) - 2:
            model._cache.advance(model._place[row], 1)
            model.texts[row].append(committed[-2])

    monkeypatch.setattr(Drafter, "commit", skips)
    with pytest.raises(KvCacheCorrupt, match=r"differs by .* from a fresh pass"):
        execute(Speculative(3), RULES, runner(), forced_acceptance=(3,), audit=True)


@pytest.mark.parametrize("family", [llama, gpt2])
def test_wrong_positions_are_caught(family, monkeypatch) -> None:
    own = runner(family)
    model = own.target.model
    honest = model._pass

    def shifted(tokens, positions, *rest):
        """In blocks as a verification feeds them."""
        return honest(tokens, positions + (1 < tokens.shape[1] < 5) * (positions > 20), *rest)

    monkeypatch.setattr(model, "_pass", shifted)
    with pytest.raises(KvCacheCorrupt, match="slot 21 differs"):
        execute(Speculative(3), RULES, own, audit=True)


def test_values_that_are_not_numbers_are_caught() -> None:
    model = LanguageModel(llama(1, seed=0))
    model.append([1, 2, 3])
    model.audit(0, [1, 2, 3])
    with torch.inference_mode():
        model._cache.entries(0)[1][0, 0, 1] = torch.nan
    with pytest.raises(KvCacheCorrupt, match="slot 1 differs by nan"):
        model.audit(0, [1, 2, 3])
