"""Distil the small draft of the `smollm2` pair from SmolLM2-135M-Instruct and package it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

PROMPT_FILE = Path(__file__).with_name("smollm2_prompts.yaml")
KINDS = {"chat": 0.5, "code": 0.2, "text": 0.3}
"""Kind of prompt -> its share."""
TEMPERATURES = (1.0, 1.0, 0.7, 0.0)
"""Training texts are generated at these in turn; evaluation texts at 1 and at 0."""
NUM_EVALUATION_PROMPTS = 64
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
)


# ------------------------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str


def prompts(split: str, seed: int) -> Iterator[Prompt]:
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
            yield Prompt(kind, text)


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


@torch.inference_mode()
def generate(
    target: BatchedTarget, batch: Sequence[tuple[Prompt, Sequence[int], float]], num_new: int, end: int, seed: int
) -> list[Text]:
    """Texts of the target: each (prompt, its ids, temperature) continued by up to `num_new` tokens, `end` included."""
    rng = torch.Generator().manual_seed(seed)
    longest = max(len(ids) for _, ids, _ in batch)
    num_pads = torch.tensor([longest - len(ids) for _, ids, _ in batch])
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for _, ids, _ in batch])
    temperatures = torch.tensor([temperature for *_, temperature in batch])
    target.begin(num_pads)
    hidden = target.append(padded)
    tokens = [list(ids) for _, ids, _ in batch]
    states = [[row[pads:].half()] for row, pads in zip(hidden, num_pads.tolist(), strict=True)]
    alive, at = list(range(len(batch))), torch.arange(len(batch))  # row of the text at each place
    last = hidden[:, -1]
    for step in range(num_new):
        drawn = draw(F.linear(last, target.embedding), temperatures[at], rng)
        for place, token in enumerate(drawn.tolist()):
            row = at[place].item()
            if row in alive:
                tokens[row].append(token)
                if token == end:
                    alive.remove(row)
        if not alive or step + 1 == num_new:
            break
        if len(alive) < 0.85 * len(at):
            places = torch.tensor([place for place, row in enumerate(at.tolist()) if row in alive])
            target.keep(places)
            at, drawn = at[places], drawn[places]
        last = target.append(drawn[:, None])[:, 0]
        for place, row in enumerate(at.tolist()):
            if row in alive:
                states[row].append(last[place : place + 1].half())
    return [
        Text(prompt.kind, temperature, len(ids), torch.tensor(tokens[i], dtype=torch.int32), torch.cat(states[i]))
        for i, (prompt, ids, temperature) in enumerate(batch)
    ]


def draw(logits: Tensor, temperatures: Tensor, rng: torch.Generator) -> Tensor:
    """One token a row, drawn at the row's temperature; the most likely one at 0."""
    greedy = logits.argmax(-1)
    scaled = logits / temperatures.clamp(min=1e-3)[:, None]
    noise = torch.empty_like(logits).exponential_(generator=rng)
    sampled = (scaled - noise.log_()).argmax(-1)
    return torch.where(temperatures > 0, sampled, greedy)


def generate_split(args: argparse.Namespace, split: str, worker: int) -> None:
    """Write batches of texts until the time is over; batch k is drawn from seed k, so that a run can be continued."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    target = BatchedTarget(args.target, max_slots=384)
    began = time.perf_counter()
    folder = args.work / split
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(worker, 10_000, args.workers):
        if time.perf_counter() - began > 60 * args.generation_minutes:
            return
        path = folder / f"{number:04}.pt"
        if path.exists():
            continue
        start = time.perf_counter()
        batch = evaluation_batch(tokenizer, number) if split == "evaluation" else training_batch(tokenizer, number, args)
        if not batch:
            return
        texts = generate(target, batch, args.new_tokens, end, seed=number)
        torch.save([vars(text) for text in texts], path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        num_new = sum(len(text.tokens) - text.num_prompt_tokens for text in texts)
        seconds = time.perf_counter() - start
        print(f"{split} {number}: {num_new} tokens in {seconds:.0f} s, {num_new / seconds:.0f}/s", flush=True)


def training_batch(tokenizer: Tokenizer, number: int, args: argparse.Namespace) -> list[tuple[Prompt, list[int], float]]:
    source = prompts("training", seed=number)
    chosen = [next(source) for _ in range(args.batch)]
    return [(p, tokenizer.encode(p.text).ids, TEMPERATURES[i % len(TEMPERATURES)]) for i, p in enumerate(chosen)]


def evaluation_batch(tokenizer: Tokenizer, number: int) -> list[tuple[Prompt, list[int], float]]:
    """Batch 0 is sampled, batch 1 greedy, from the same prompts."""
    if number > 1:
        return []
    source = prompts("evaluation", seed=0)
    chosen = [next(source) for _ in range(NUM_EVALUATION_PROMPTS)]
    return [(p, tokenizer.encode(p.text).ids, 1.0 - number) for p in chosen]


# ----------------------------------------------------------------------------------------------------------- training

LAYERS = (0, 1, 28, 29)
"""The target's layers the draft starts from."""
NUM_HEAD_TOKENS = 8192
SYSTEM_TOKENS = 22
"""Of a chat prompt, what is always the same: nothing is learned from it."""


def texts(folder: Path) -> list[Text]:
    batches = (torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt")))
    return [Text(**text) for batch in batches for text in batch]


def frequent_tokens(texts: Sequence[Text], num: int) -> Tensor:
    """Ids of the `num` most frequent tokens, rising; of equally frequent ones the lower ids."""
    counts = Counter(token for text in texts for token in text.tokens.tolist())
    ranked = sorted(range(49152), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:num]))


class Draft(torch.nn.Module):
    """A few of the target's layers and its final norm; embedding and head rows are the target's own and stay so."""

    def __init__(self, folder: Path, token_ids: Tensor, layers: Sequence[int]) -> None:
        super().__init__()
        weights = load_file(folder / "model.safetensors")
        config = LlamaConfig(**json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": len(layers)})
        self.model = LlamaModel(config)
        kept = {
            name.removeprefix("model."): weights[name]
            for name in ("model.embed_tokens.weight", "model.norm.weight")
        }
        for index, layer in enumerate(layers):
            prefix = f"model.layers.{layer}."
            kept |= {f"layers.{index}.{n.removeprefix(prefix)}": w for n, w in weights.items() if n.startswith(prefix)}
        self.model.load_state_dict(kept)
        self.model.embed_tokens.requires_grad_(False)
        self.token_ids = token_ids
        self.head = weights["model.embed_tokens.weight"][token_ids].clone()

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, n) tokens -> (rows, n, d) states before the head."""
        return self.model(input_ids=tokens, use_cache=False).last_hidden_state

    def trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[list[Text]]:
    """Endless batches of texts of about the same length; every text once an epoch."""
    rng = random.Random(seed)
    while True:
        ordered = sorted(texts, key=lambda text: (len(text.tokens), rng.random()))
        offset = rng.randrange(size)
        bounds = [0, *range(offset, len(ordered), size), len(ordered)]
        chunks = [ordered[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        rng.shuffle(chunks)
        yield from chunks


def losses(draft: Draft, batch: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Sums over the positions of a batch: cross-entropy to the target on the head's tokens, in nats, and 1 - sum min(p, q).

    Also the number of positions."""
    longest = max(len(text.hidden) for text in batch)
    tokens = torch.stack([F.pad(t.tokens[: len(t.hidden)].long(), (0, longest - len(t.hidden))) for t in batch])
    states = draft(tokens)
    firsts = [SYSTEM_TOKENS if text.kind != "text" else 0 for text in batch]
    mine = torch.cat([row[f : len(t.hidden)] for row, f, t in zip(states, firsts, batch, strict=True)])
    theirs = torch.cat([t.hidden[f:].float() for f, t in zip(firsts, batch, strict=True)])
    with torch.no_grad():
        target_probs = F.linear(theirs, draft.head).softmax(-1)
    log_probs = F.linear(mine, draft.head).log_softmax(-1)
    cross_entropy = -(target_probs * log_probs).sum()
    distance = 0.5 * (target_probs - log_probs.exp()).abs().sum()
    return cross_entropy / len(mine), distance / len(mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/smollm2"))
    parser.add_argument("--target", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=112)
    parser.add_argument("--generation-minutes", type=float, default=10)
    args = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[args.worker]})
    for split in ("evaluation", "training"):
        generate_split(args, split, args.worker)


if __name__ == "__main__":
    main()
