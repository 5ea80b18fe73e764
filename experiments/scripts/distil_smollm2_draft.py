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
"""The target's layers that the draft starts from."""
NUM_HEAD_TOKENS = 8192
NUM_SYSTEM_TOKENS = 22
"""Of a chat prompt, what is always the same: nothing is to be learned there."""


@dataclass(frozen=True)
class Recipe:
    """`num_steps` of cross-entropy to the target at a constant rate, then `num_last_steps` of total variation, which is
    what acceptance loses, at a rate that falls to 0. A step is `batch_size` texts."""

    num_steps: int
    num_last_steps: int
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/smollm2"))
    parser.add_argument("--target", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=112)
    parser.add_argument("--generation-minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last-steps", type=int, default=100)
    parser.add_argument("stage", choices=["generate", "train", "package"])
    args = parser.parse_args()
    if args.stage == "train":
        train(args.work, args.target, Recipe(args.steps, args.last_steps))
        return
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[args.worker]})
    for split in ("evaluation", "training"):
        generate_split(args, split, args.worker)


if __name__ == "__main__":
    main()
