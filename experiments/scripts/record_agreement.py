"""Record how the packaged pairs agree on held-out prompts, small enough to be kept: `experiments/paper/data/*.parquet`.

    python -m experiments.scripts.record_agreement [NAME ...]

Probabilities keep three digits. `<name>.branches.parquet` holds, row by row of a record, what the draft model would
draft after each of its likeliest tokens, `<name>.paths.parquet` what it holds for likely along the path that it would
draft.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.concurrency import open_runner
from executor.language_model import LanguageModel
from executor.pairs import Pair, load_pair
from executor.profiling import measure_agreement
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.workload import Workload

DATA = Path(__file__).parents[1] / "paper" / "data"
PACKAGED = Path(__file__).parents[2] / "executor" / "packaged_pairs"
PROMPT_TOKENS = 64
DIGITS = 3


@dataclass(frozen=True)
class Recording:
    """Prompts of a pair whose `key` in the prompts file fulfils `is_in`, calibration and test prompts in turn."""

    pair: str
    dataset: str
    key: str
    is_in: Callable[[str], bool]
    temperature: float
    num_prompts: int
    new_tokens: int
    num_candidates: int = 14
    branches: int = 0  # whose continuations are kept, of each position
    branch_tokens: int = 4
    path_candidates: int = 0  # kept of each token of the draft model's greedy path
    path_tokens: int = 4


def _is_editor(file: str) -> bool:
    return file.startswith("idlelib/")


def _is_library(file: str) -> bool:
    return not _is_editor(file)


def _is_any(kind: str) -> bool:
    return True


_LIBRARY = Recording("stdlib", "library files", "file", _is_library, 0.0, num_prompts=48, new_tokens=64)
_EDITOR = replace(_LIBRARY, dataset="files of the editor", is_in=_is_editor)
_LONG = replace(_LIBRARY, num_prompts=12, new_tokens=256, num_candidates=8, branches=4)
_SMOLLM2 = Recording("smollm2", "chat, code and text", "kind", _is_any, 0.0, num_prompts=32, new_tokens=48)

RECORDINGS = {
    "library_t0": replace(_LIBRARY, path_candidates=8),
    "library_t1": replace(_LIBRARY, temperature=1.0),
    "editor_t0": _EDITOR,
    "editor_t1": replace(_EDITOR, temperature=1.0),
    "smollm2_t0": _SMOLLM2,
    "smollm2_t1": replace(_SMOLLM2, temperature=1.0),
    "long_t0": _LONG,
    "long_t1": replace(_LONG, temperature=1.0),
}


def record(recording: Recording) -> AgreementRecord:
    """One autoregressive run of the target per prompt, scored by the draft model."""
    pair = load_pair(recording.pair)
    workload = Workload(
        dataset=recording.dataset,
        prompts=tuple(_prompts(pair, recording)),
        max_new_tokens=recording.new_tokens,
        temperature=recording.temperature,
        stop_ids=pair.stop_ids,
    )
    with open_runner(pair, "serial") as runner:
        measured = measure_agreement(runner, workload, num_candidates=recording.num_candidates)
    return _shortened(measured)


def _prompts(pair: Pair, recording: Recording) -> Iterator[tuple[int, ...]]:
    """In turns of the two splits, so that every other prompt is held out from the rest."""
    lines = (PACKAGED / recording.pair / "prompts.jsonl").read_text().splitlines()
    texts: dict[str, list[tuple[int, ...]]] = {"calibration": [], "test": []}
    assert pair.tokenizer is not None
    for line in map(json.loads, lines):
        ids = tuple(pair.tokenizer.encode(line["text"], add_special_tokens=False).ids)
        if recording.is_in(line[recording.key]) and len(ids) >= PROMPT_TOKENS:
            texts[line["split"]].append(ids[:PROMPT_TOKENS])
    for calibration, test in list(zip(*texts.values(), strict=False))[: recording.num_prompts // 2]:
        yield from (calibration, test)


def _shortened(found: AgreementRecord) -> AgreementRecord:
    """With as many digits as the file keeps."""
    columns: dict[str, Any] = {name: _digits(getattr(found, name)) for name in ("overlap", "top_p", "top_q")}
    columns |= {name: np.round(getattr(found, name), DIGITS + 1).astype(np.float32) for name in ("log_p", "log_q")}
    columns |= {name: getattr(found, name).astype(np.int32) for name in ("token", "rank", "top_token", "position")}
    return replace(found, **columns)


def _digits(values: NDArray[np.floating]) -> NDArray[np.float32]:
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.maximum(values, 1e-12))))
    return np.where(values > 1e-12, np.round(values * scale) / scale, 0.0).astype(np.float32)


# -------------------------------------------------------------------------------------------------- what it would draft


def _branches(draft: LanguageModel, found: AgreementRecord, recording: Recording) -> pa.Table:
    """`continuation`: what the draft model would draft, greedily, after each of its likeliest tokens at a position."""
    width = recording.branches * recording.branch_tokens
    continuation = np.zeros((len(found.token), width), dtype=np.int16)
    for rows, starts in _starts(found):
        likeliest = found.top_token[rows, : recording.branches].tolist()
        texts = [(*start, token) for start, tokens in zip(starts, likeliest, strict=True) for token in tokens]
        tokens, _ = _greedy(draft, texts, recording.branch_tokens)
        continuation[rows] = tokens.numpy().reshape(len(rows), width)
    return pa.table({"continuation": _lists(continuation)})


def _paths(draft: LanguageModel, found: AgreementRecord, recording: Recording) -> pa.Table:
    """`top_token` and `top_q` along the draft model's greedy path from a position on, its own first token included:
    those of the first position stand in the record."""
    shape = (len(found.token), recording.path_tokens * recording.path_candidates)
    top_token, top_q = np.zeros(shape, dtype=np.int16), np.zeros(shape, dtype=np.float32)
    for rows, starts in _starts(found):
        texts = [(*start, token) for start, token in zip(starts, found.top_token[rows, 0].tolist(), strict=True)]
        _, probs = _greedy(draft, texts, recording.path_tokens)
        best = probs.topk(recording.path_candidates, dim=-1)
        top_token[rows] = best.indices.numpy().reshape(len(rows), -1)
        top_q[rows] = _digits(best.values.numpy()).reshape(len(rows), -1)
    return pa.table({"top_token": _lists(top_token), "top_q": _lists(top_q)})


def _starts(found: AgreementRecord) -> Iterator[tuple[NDArray[np.int64], list[tuple[int, ...]]]]:
    """Rows of the record at the same place of their texts, and all tokens before them."""
    first_row = np.concatenate([[0], np.cumsum(found.lengths)])
    texts = [found.text(prompt) for prompt in range(found.num_prompts)]
    for place in range(int(found.lengths.max())):
        prompts = np.flatnonzero(found.lengths > place)
        yield first_row[prompts] + place, [(*found.prompt_tokens[p], *texts[p][:place]) for p in prompts]


def _greedy(draft: LanguageModel, texts: Sequence[tuple[int, ...]], num_tokens: int) -> tuple[Tensor, Tensor]:
    """(num_texts, num_tokens) greedy continuations of texts of equal length, and the laws (..., V) of their tokens."""
    rows, unfed = draft.with_rows(len(texts)), torch.tensor(texts)
    tokens, probs = [], []
    for _ in range(num_tokens):
        probs.append(rows.append_rows(unfed, num_logits=1)[:, 0].softmax(-1))
        unfed = probs[-1].argmax(-1, keepdim=True)
        tokens.append(unfed)
    return torch.cat(tokens, 1), torch.stack(probs, 1)


def _lists(values: NDArray[Any]) -> pa.Array:
    return pa.array(list(values))


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names or RECORDINGS:
        if name not in RECORDINGS:
            raise BadInput("name", f"must be one of {', '.join(RECORDINGS)}", name)
        recording = RECORDINGS[name]
        found = record(recording)
        found.write(DATA / f"{name}.parquet")
        _write(pq.read_table(DATA / f"{name}.parquet"), f"{name}.parquet")
        draft = load_pair(recording.pair).load("draft")
        if recording.branches:
            _write(_branches(draft, found, recording), f"{name}.branches.parquet")
        if recording.path_candidates:
            _write(_paths(draft, found, recording), f"{name}.paths.parquet")
        print(f"{name}: {found.num_prompts} prompts, {len(found.token)} tokens", flush=True)


def _write(table: pa.Table, name: str) -> None:
    pq.write_table(table, DATA / name, compression="zstd", compression_level=19)


if __name__ == "__main__":
    main(sys.argv[1:])
