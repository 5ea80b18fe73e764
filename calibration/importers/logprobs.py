"""Log-probabilities of target and draft along the same texts, from any OpenAI-compatible server: an agreement record.

Minimal input: two files, the target's and the draft's, each with one response of `/v1/completions` per text (JSON
Lines, or a JSON list), in one order, of the same token sequences: first a prompt, then what the target generated from
it. Either form of a choice is read:

- `logprobs` of a request with `echo: true` and `logprobs: k`: `tokens`, `token_logprobs`, `top_logprobs` (first null).
  Token texts stand for tokens. The rank of a token outside the top k is not told.
- `prompt_logprobs` of vLLM (`prompt_logprobs: k`): per position a mapping from token id to `logprob` and `rank`, the
  token of the text first. Ranks are exact. `prompt_token_ids`, where returned, are checked against it.

The number of prompt tokens and the temperature must be told. Log-probabilities are taken to be those before any
sampling setting: the texts must be greedy (0; every token then is the target's first, which is checked) or drawn at
temperature 1 without any other setting. Other temperatures are refused: the mass outside the top k does not say what it
becomes at them.

What is exact: p and q of the text's tokens and with them acceptance, and all ranks within the top k. What a token
outside the top k has is only bounded, by the least of the top k and by the mass that is left. At temperature 1 that
leaves open which tokens a rejection removes from the prepared ones: the record comes twice, with the least and with the
most that hits can be, of drafts that are sampled plainly (bounds of down-weighted ones are not worked out). Fan-outs
above k are refused when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.importers.imported import Imported, Source, Told, json_objects
from calibration.importers.serving_run import NO_BUILD
from calibration.importers.step_times import step_times
from sim.agreement import AgreementRecord
from sim.errors import BadInput

FloatArray = NDArray[np.float64]
Token = int | str
FEWEST_TEXTS = 5
FEWEST_CANDIDATES = 2
ROUNDING = 1e-6


@dataclass(frozen=True)
class Scored:
    """One position of a text: its token, its log-probability, its rank where the server tells it (0 is the first), and
    the log-probabilities of all tokens listed, which hold the text's own."""

    token: Token
    log_prob: float
    rank: int | None
    listed: Mapping[Token, float]

    @property
    def best_first(self) -> list[Token]:
        return sorted(self.listed, key=lambda token: -self.listed[token])


@dataclass(frozen=True)
class Text:
    """A text as one model scored it: the tokens, None where the server leaves one out, and every position but the
    first."""

    tokens: tuple[Token | None, ...]
    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class Dump:
    """The texts of one file; `num_top` is the k of every position."""

    name: str
    model: str
    texts: tuple[Text, ...]
    num_top: int


def import_logprobs(sources: Sequence[Source], told: Told) -> Imported:
    """The target's file first. Raises `BadInput` if texts differ, or naming what cannot be known from the files."""
    if len(sources) != 2:
        raise BadInput("files", "must be two: the target's log-probabilities and the draft's", len(sources))
    temperature = told.temperature
    if temperature not in (0, 1):
        rule = "must be told, 0 or 1: the mass outside the top tokens does not say what it becomes at others"
        raise BadInput("--temperature", rule, temperature)
    target, draft = (_dump(source) for source in sources)
    _check_same(target, draft)
    prompt_tokens = told.need("prompt_tokens", target.name)
    low, high = _records(target, draft, prompt_tokens, float(temperature))
    if temperature == 0:
        _check_greedy(target, prompt_tokens)
    times = step_times(None, None, None)
    is_exact = _alike(low, high)
    records = {"agreement.parquet": low} if is_exact else {"agreement.low.parquet": low, "agreement.high.parquet": high}
    batch_size = {} if told.batch_size is None else {"text.batch_size": told.batch_size}
    return Imported(
        engine="logprobs",
        learned={**batch_size, "acceptance.records": list(records), **times.learned},
        how=(
            f"{low.num_prompts} texts, {len(low.prompt)} positions; mean acceptance {low.acceptance.mean():.4g}",
            f"fan-outs up to {low.num_candidates} of one accepted count",
        ),
        not_learned=(*_open(low, high, is_exact=is_exact), *times.not_learned, NO_BUILD),
        assumed=times.assumed,
        records=records,
    )


def _open(low: AgreementRecord, high: AgreementRecord, *, is_exact: bool) -> Iterator[str]:
    if not is_exact:
        width = float(np.mean(high.overlap - low.overlap))
        yield f"the overlap of the distributions outside the top tokens: {width:.3g} between its bounds on average"
    if low.num_prompts < FEWEST_TEXTS:
        yield f"how texts differ: there are only {low.num_prompts}"


# ---------------------------------------------------------------------------------------------------------- reading


def _dump(source: Source) -> Dump:
    responses = json_objects(source)
    texts = [
        _text(choice, f"{source.name}, text {number}, choice {index}")
        for number, response in enumerate(responses)
        for index, choice in enumerate(_choices(response, f"{source.name}, text {number}"))
    ]
    positions = [scored for text in texts for scored in text.scored]
    if not positions:
        raise BadInput(source.name, "must hold positions with log-probabilities")
    num_top = _num_top(positions)
    if num_top < FEWEST_CANDIDATES:
        raise BadInput(source.name, f"must list at least {FEWEST_CANDIDATES} top tokens at every position", num_top)
    return Dump(source.name, str(responses[0].get("model", "unknown")), tuple(texts), num_top)


def _choices(response: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise BadInput(f"{name}: choices", "must be those of a completion")
    return choices


def _text(choice: Mapping[str, Any], name: str) -> Text:
    try:
        if choice.get("prompt_logprobs"):
            return _of_ids(choice)
        if choice.get("logprobs"):
            return _of_words(choice["logprobs"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadInput(name, f"must be as servers write it ({type(error).__name__}: {error})") from None
    raise BadInput(name, "must hold logprobs (of a request with echo) or prompt_logprobs")


def _of_ids(choice: Mapping[str, Any]) -> Text:
    first, *others = choice["prompt_logprobs"]
    if first is not None:
        raise ValueError("the first of prompt_logprobs must be null")
    scored = [_scored_ids(entry) for entry in others]
    given = choice.get("prompt_token_ids")
    tokens: tuple[Token | None, ...] = (given[0] if given else None, *(entry.token for entry in scored))
    if given and list(tokens) != list(given):
        raise ValueError("prompt_token_ids must be the first tokens of prompt_logprobs")
    return Text(tokens, tuple(scored))


def _scored_ids(entry: Mapping[str, Mapping[str, Any]]) -> Scored:
    listed: dict[Token, float] = {int(token): float(told["logprob"]) for token, told in entry.items()}
    token, told = next(iter(entry.items()))
    rank = told.get("rank")
    return Scored(int(token), listed[int(token)], None if rank is None else int(rank) - 1, listed)


def _of_words(logprobs: Mapping[str, Any]) -> Text:
    tokens, own, top = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not len(tokens) == len(own) == len(top):
        raise ValueError("tokens, token_logprobs and top_logprobs must be of one length")
    if own[0] is not None:
        raise ValueError("the first of token_logprobs must be null: ask with echo")
    scored = [
        Scored(token, float(log_prob), None, {**{word: float(value) for word, value in best.items()}, token: log_prob})
        for token, log_prob, best in zip(tokens[1:], own[1:], top[1:], strict=True)
    ]
    return Text(tuple(tokens), tuple(scored))


def _num_top(positions: Sequence[Scored]) -> int:
    """k. A position lists k tokens, and one more where the text's own is not among them: it is the last then."""
    own_is_last = [scored.best_first[-1] == scored.token for scored in positions]
    certain = [len(scored.listed) for scored, is_last in zip(positions, own_is_last, strict=True) if not is_last]
    return min(certain) if certain else min(len(scored.listed) for scored in positions) - 1


def _check_same(target: Dump, draft: Dump) -> None:
    """Raises `BadInput` naming the first position at which the two files differ."""
    if len(target.texts) != len(draft.texts):
        rule = f"must hold as many texts as {target.name}, {len(target.texts)}"
        raise BadInput(draft.name, rule, len(draft.texts))
    for number, (ours, theirs) in enumerate(zip(target.texts, draft.texts, strict=True)):
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        differs = (position for position, (one, other) in enumerate(pairs) if one != other)
        first = next(differs, None if len(ours.tokens) == len(theirs.tokens) else "its length")
        if first is not None:
            raise BadInput(
                f"{draft.name}, text {number}", f"must have the tokens of {target.name}", f"position {first}"
            )


def _check_greedy(target: Dump, prompt_tokens: int) -> None:
    """Raises `BadInput` if a token is not the target's first: then the text is not its own at temperature 0."""
    ranks = [
        scored.rank if scored.rank is not None else scored.best_first.index(scored.token)
        for text in target.texts
        for scored in text.scored[prompt_tokens - 1 :]
    ]
    others = sum(rank > 0 for rank in ranks)
    if others:
        rule = "must be the target's own text at temperature 0, where every token is its first"
        raise BadInput(target.name, rule, f"{others} of {len(ranks)} tokens that are not")


# ---------------------------------------------------------------------------------------------------------- record


@dataclass(frozen=True)
class Tail:
    """What tokens that are not listed can have: each at most `most`, all together `mass`."""

    most: float
    mass: float


@dataclass(frozen=True)
class Row:
    """One position of a record, with the lower and the upper end of what is open."""

    prompt: int
    position: int
    token: int
    log_p: float
    log_q: float
    rank: tuple[int, int]  # for the fewest and for the most hits
    overlap: tuple[float, float]
    top_token: list[int]
    top_p: tuple[list[float], list[float]]  # the most and the least: for the fewest and for the most hits
    top_q: list[float]


def _records(target: Dump, draft: Dump, prompt_tokens: int, temperature: float) -> tuple[AgreementRecord, ...]:
    """With the fewest and with the most hits."""
    ids = _Ids()
    rows: list[Row] = []
    for number, (ours, theirs) in enumerate(zip(target.texts, draft.texts, strict=True)):
        if len(ours.tokens) <= prompt_tokens:
            rule = f"must be longer than its prompt of {prompt_tokens} tokens"
            raise BadInput(f"{target.name}, text {number}", rule, len(ours.tokens))
        pairs = zip(ours.scored[prompt_tokens - 1 :], theirs.scored[prompt_tokens - 1 :], strict=True)
        rows += [
            _row(number, position, by_target, by_draft, (target.num_top, draft.num_top), ids)
            for position, (by_target, by_draft) in enumerate(pairs)
        ]
    prompts = [text.tokens[:prompt_tokens] for text in target.texts]
    is_known = all(token is not None for prompt in prompts for token in prompt)
    lengths = [len(text.tokens) - prompt_tokens for text in target.texts]
    identity = {
        "dataset": f"dump of log-probabilities, {target.name}",
        "temperature": temperature,
        "stop_ids": [],
        "max_new_tokens": max(lengths),
        "target": target.model,
        "draft": draft.model,
    }
    low = AgreementRecord(
        identity=identity,
        prompt_length=np.full(len(prompts), prompt_tokens),
        stopped=np.zeros(len(prompts), dtype=bool),
        prompt=np.array([row.prompt for row in rows]),
        position=np.array([row.position for row in rows]),
        token=np.array([row.token for row in rows]),
        log_p=np.array([row.log_p for row in rows]),
        log_q=np.array([row.log_q for row in rows]),
        rank=np.array([row.rank[0] for row in rows]),
        overlap=np.array([row.overlap[0] for row in rows]),
        top_token=np.array([row.top_token for row in rows]),
        top_p=np.array([row.top_p[0] for row in rows]),
        top_q=np.array([row.top_q for row in rows]),
        prompt_tokens=tuple(tuple(ids[token] for token in prompt) for prompt in prompts) if is_known else (),
    )
    high = replace(
        low,
        rank=np.array([row.rank[1] for row in rows]),
        overlap=np.array([row.overlap[1] for row in rows]),
        top_p=np.array([row.top_p[1] for row in rows]),
    )
    return low, high


class _Ids:
    """Numbers for tokens: ids are their own, texts are numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[Token, int] = {}

    def __getitem__(self, token: Token | None) -> int:
        assert token is not None
        return token if isinstance(token, int) else self._numbers.setdefault(token, len(self._numbers))


def _row(prompt: int, position: int, ours: Scored, theirs: Scored, num_top: tuple[int, int], ids: _Ids) -> Row:
    p, q = ({token: math.exp(value) for token, value in scored.listed.items()} for scored in (ours, theirs))
    p_tail, q_tail = _tail(ours, p, num_top[0]), _tail(theirs, q, num_top[1])
    top = theirs.best_first[: num_top[1]]
    return Row(
        prompt=prompt,
        position=position,
        token=ids[ours.token],
        log_p=min(0.0, ours.log_prob),
        log_q=min(0.0, theirs.log_prob),
        rank=_rank(theirs, num_top[1]),
        overlap=overlap_bounds(p, q, p_tail, q_tail),
        top_token=[ids[token] for token in top],
        top_p=([p.get(token, p_tail.most) for token in top], [p.get(token, 0.0) for token in top]),
        top_q=[q[token] for token in top],
    )


def _tail(scored: Scored, probs: Mapping[Token, float], num_top: int) -> Tail:
    mass = max(0.0, 1.0 - sum(probs.values()))
    return Tail(min(probs[scored.best_first[num_top - 1]], mass), mass)


def _rank(scored: Scored, num_top: int) -> tuple[int, int]:
    """Outside the top k and not told: k at least, which counts only where k tokens are prepared."""
    if scored.rank is not None:
        return scored.rank, scored.rank
    place = scored.best_first.index(scored.token)
    return (place, place) if place < num_top else (num_top + 1, num_top)


def overlap_bounds(
    p: Mapping[Token, float], q: Mapping[Token, float], p_tail: Tail, q_tail: Tail
) -> tuple[float, float]:
    """Bounds of sum min(p, q) over a vocabulary of which `p` and `q` list some tokens, and all else is bounded.

    Tokens that both list are certain. One that only p lists can have at most the tail of q, and the other way round;
    what no list holds can share what is then left of both tails.
    """
    certain = sum(min(p[token], q[token]) for token in p.keys() & q.keys())
    only_p = min(q_tail.mass, sum(min(p[token], q_tail.most) for token in p.keys() - q.keys()))
    only_q = min(p_tail.mass, sum(min(q[token], p_tail.most) for token in q.keys() - p.keys()))
    neither = min(q_tail.mass - only_p, p_tail.mass - only_q)
    return min(1.0, certain), min(1.0, certain + only_p + only_q + neither)


def _alike(low: AgreementRecord, high: AgreementRecord) -> bool:
    """Whether both ends give the same answers: at temperature 0 the overlap and p beyond the text do not count."""
    columns = ("rank",) if low.temperature == 0 else ("rank", "overlap", "top_p")
    return all(np.abs(getattr(low, name) - getattr(high, name)).max(initial=0) <= ROUNDING for name in columns)
