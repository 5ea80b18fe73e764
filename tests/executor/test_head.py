"""Whatever a model's head is wide, its logits are those of the pair's ids."""

import pytest
import torch

from executor.head import Head
from executor.language_model import LanguageModel
from executor.sampling import process
from sim.errors import BadInput
from sim.workload import Sampling
from tests.executor.tiny_models import llama

ROWS = torch.arange(12.0).view(2, 6) + 1


def test_a_head_of_the_pairs_width_is_left_alone() -> None:
    head = Head("model", 6, vocab_size=6)
    assert torch.equal(head.logits(ROWS), ROWS)
    assert head.cut_rows == []


def test_padding_is_cut() -> None:
    head = Head("model", 6, vocab_size=4)
    assert torch.equal(head.logits(ROWS), ROWS[:, :4])
    assert head.cut_rows == [4, 5]


def test_ids_without_a_row_have_probability_zero() -> None:
    logits = Head("model", 6, vocab_size=8).logits(ROWS)
    assert torch.equal(logits[:, :6], ROWS) and (logits[:, 6:] == -torch.inf).all()
    assert (process(logits, Sampling(1.0))[:, 6:] == 0).all()
    assert torch.allclose(process(logits, Sampling(1.0))[:, :6], process(ROWS, Sampling(1.0)))


def test_rows_of_a_reduced_head_go_to_their_ids() -> None:
    token_ids = [7, 0, 3, 99, 2, 5]
    logits = Head("model", 6, vocab_size=9, token_ids=torch.tensor(token_ids), unused_ids={2, 8}).logits(ROWS)
    for row, token_id in enumerate(token_ids):
        if token_id not in (99, 2):
            assert torch.equal(logits[:, token_id], ROWS[:, row])
    assert [i for i in range(9) if logits[0, i] == -torch.inf] == [1, 2, 4, 6, 8]


def test_ids_in_between_that_no_string_has_are_cut() -> None:
    head = Head("model", 6, vocab_size=5, unused_ids=(1, 4))
    assert (head.logits(ROWS)[0] == -torch.inf).tolist() == [False, True, False, False, True]
    assert head.cut_rows == [1, 4, 5]


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ([0, 1, 2], "one id for each of the head's 6 rows, got 3"),
        ([0, 1, 2, 3, 4, 4], "different ids"),
        ([0, 1, 2, 3, 4, -1], "different ids"),
        ([10, 11, 12, 13, 14, 15], "below the vocabulary size 8"),
    ],
)
def test_ids_that_do_not_fit_the_head_are_refused(token_ids, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        Head("model", 6, vocab_size=8, token_ids=token_ids)


def test_a_model_speaks_of_the_pairs_ids_only() -> None:
    model = LanguageModel(llama(1, seed=0, vocab_size=136), vocab_size=120, unused_ids=(60,))
    model.check()
    logits = model.append([5, 6, 7])
    assert logits.shape == (3, 120) and (logits[:, 60] == -torch.inf).all()
    assert model.with_rows(2).append_rows(torch.tensor([[5], [6]])).shape == (2, 1, 120)


def test_a_reduced_head_changes_nothing_but_what_it_lacks() -> None:
    kept = [3, 100, 8, 9, 127, 64]
    whole, reduced = llama(1, seed=0), llama(1, seed=0)
    reduced.lm_head = torch.nn.Linear(32, len(kept), bias=False).double()
    reduced.lm_head.weight.data = whole.lm_head.weight.data[kept].clone()
    model = LanguageModel(reduced.requires_grad_(False), vocab_size=128, token_ids=kept)
    model.check()
    logits = model.append([5, 6, 7])
    assert torch.allclose(logits[:, kept], LanguageModel(whole).append([5, 6, 7])[:, kept])
    assert int(logits.isfinite().sum()) == 3 * len(kept)


def test_a_model_that_cannot_embed_an_id_is_refused() -> None:
    with pytest.raises(BadInput, match="must embed all 130 ids, which may be committed, got 128"):
        LanguageModel(llama(1, seed=0), vocab_size=130)
