"""Train the `stdlib` pair from scratch on the Python standard library and package its weights.

    python experiments/scripts/train_stdlib_pair.py --workers 2                    # everything, resumable
    python experiments/scripts/train_stdlib_pair.py --package-only                 # evaluate and write the pair again

Stages, each resumable from its last checkpoint under --work:

1. `corpus`   the interpreter's own library sources (no tests), split into train / held-out by a hash of the file name;
              a byte-level BPE is trained on the training part.
2. `draft`    a one-layer Llama, next-token loss.
3. `target`   *grown* from the draft: the draft's layer is kept and new layers are stacked on it whose output
              projections start at zero, so that training starts from the draft's function. A pair of unrelated models
              of this size agrees far less.
4. `distil`   the draft again, now towards the target's full next-token distribution.
5. `package`  fp16 safetensors, held-out prompts, agreement figures, the model card, and a check of what is asked of it.

The optimiser is Muon for the matrices of the layers and AdamW for everything else. `--workers N` runs N processes that
average gradients, each pinned to one core with one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_ONE_IN = 16
EXCLUDED_PARTS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib-dynload"}


@dataclass(frozen=True)
class Shape:
    """Size of one model of the pair; both share vocabulary, width and head size."""

    num_layers: int
    hidden_size: int = 160
    intermediate_size: int = 432
    num_heads: int = 5

    def config(self, vocab_size: int, end_of_text: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )


@dataclass(frozen=True)
class Recipe:
    """How one stage is trained; a step is `batch_size` windows of `window` tokens, over all workers together."""

    num_steps: int
    batch_size: int
    window: int
    peak_lr: float
    warmup_steps: int
    seed: int

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine to a twentieth of the peak."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


DRAFT_SHAPE = Shape(num_layers=1)
TARGET_SHAPE = Shape(num_layers=8)
PAIR_FOLDER = Path(__file__).parents[2] / "executor" / "packaged_pairs" / "stdlib"


# ------------------------------------------------------------------------------------------------------------- corpus


def library_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
    return sorted((name, path) for name, path in files if not EXCLUDED_PARTS & set(Path(name).parts))


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="ignore")


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare_corpus(work: Path, vocab_size: int) -> None:
    """Write tokenizer.json, train.npy, held_out.npy (token ids, files separated by end-of-text) and corpus.json."""
    if (work / "corpus.json").exists():
        return
    files = library_files()
    texts = {name: read_text(path) for name, path in files}
    train = [name for name in texts if not is_held_out(name)]
    held_out = [name for name in texts if is_held_out(name)]
    tokenizer = train_tokenizer([texts[name] for name in train], vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    for split, names in (("train", train), ("held_out", held_out)):
        ids = [[end, *encoding.ids] for encoding in tokenizer.encode_batch([texts[name] for name in names])]
        np.save(work / f"{split}.npy", np.concatenate([np.array(row, dtype=np.uint16) for row in ids]))
    facts = {
        "vocab_size": tokenizer.get_vocab_size(),
        "num_train_files": len(train),
        "num_held_out_files": len(held_out),
        "held_out_files": held_out,
        "train_bytes": sum(len(texts[name].encode()) for name in train),
        "held_out_bytes": sum(len(texts[name].encode()) for name in held_out),
        "python": sysconfig.get_python_version(),
    }
    (work / "corpus.json").write_text(json.dumps(facts, indent=1))


class Corpus:
    """Token ids of both splits, and reproducible random windows of the training split."""

    def __init__(self, work: Path) -> None:
        self.facts = json.loads((work / "corpus.json").read_text())
        self.train = np.load(work / "train.npy")
        self.held_out = np.load(work / "held_out.npy")
        self.end_of_text = Tokenizer.from_file(str(work / "tokenizer.json")).get_vocab()[END_OF_TEXT]
        self.vocab_size = self.facts["vocab_size"]

    def windows(self, recipe: Recipe, step: int, rank: int, world: int) -> torch.Tensor:
        """(batch_size / world, window + 1) token ids; the same for the same (seed, step, rank)."""
        rng = np.random.default_rng((recipe.seed, step, rank))
        starts = rng.integers(0, len(self.train) - recipe.window - 1, size=recipe.batch_size // world)
        rows = [self.train[start : start + recipe.window + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))

    def held_out_windows(self, window: int, limit: int | None) -> torch.Tensor:
        num = len(self.held_out) // (window + 1)
        num = num if limit is None else min(limit, num)
        picks = np.linspace(0, len(self.held_out) - window - 2, num).astype(int)
        return torch.from_numpy(np.stack([self.held_out[i : i + window + 1].astype(np.int64) for i in picks]))


# ----------------------------------------------------------------------------------------------------------- training


def new_model(shape: Shape, corpus: Corpus, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = shape.config(corpus.vocab_size, corpus.end_of_text)
    config.initializer_range = 0.05
    return LlamaForCausalLM(config)


def grow(draft: LlamaForCausalLM, shape: Shape, corpus: Corpus, seed: int) -> LlamaForCausalLM:
    """A deeper model that computes the draft's function: extra layers whose two output projections are zero."""
    target = new_model(shape, corpus, seed)
    num_kept = draft.config.num_hidden_layers
    target.model.embed_tokens.load_state_dict(draft.model.embed_tokens.state_dict())
    target.model.norm.load_state_dict(draft.model.norm.state_dict())
    for index, layer in enumerate(target.model.layers):
        if index < num_kept:
            layer.load_state_dict(draft.model.layers[index].state_dict())
        else:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return target


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def next_token_loss(model, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def distillation_loss(model, target: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy to the target's full distribution, in nats per token."""
    with torch.no_grad():
        target_probs = target(windows[:, :-1], use_cache=False).logits.softmax(-1)
    log_probs = model(windows[:, :-1], use_cache=False).logits.log_softmax(-1)
    return -(target_probs * log_probs).sum(-1).mean()


@torch.no_grad()
def held_out_nats(model: LlamaForCausalLM, corpus: Corpus, window: int = 512, limit: int | None = 64) -> float:
    model.eval()
    rows = corpus.held_out_windows(window, limit)
    losses = [next_token_loss(model, chunk).item() * len(chunk) for chunk in rows.split(8)]
    model.train()
    return sum(losses) / len(rows)


def average_gradients(model: LlamaForCausalLM, world: int) -> None:
    if world == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def run_stage(rank: int, world: int, work: Path, stage: str, recipe: Recipe) -> None:
    """One process of one stage. Rank 0 evaluates, prints and saves `<stage>.pt` every 200 steps and at the end."""
    torch.set_num_threads(1)
    if world > 1:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("gloo", rank=rank, world_size=world)
    corpus = Corpus(work)
    target = None
    if stage == "target":
        model = grow(load_stage(work, "draft", DRAFT_SHAPE, corpus), TARGET_SHAPE, corpus, recipe.seed)
    elif stage == "distil":
        model = load_stage(work, "draft", DRAFT_SHAPE, corpus)
        target = load_stage(work, "target", TARGET_SHAPE, corpus).eval()
    else:
        model = new_model(DRAFT_SHAPE, corpus, recipe.seed)
    opts = optimizers(model)
    log: list[dict[str, float]] = []
    start, seconds_before = 0, 0.0
    checkpoint = work / f"{stage}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        start, log, seconds_before = state["step"], state["log"], state["seconds"]
    began = time.perf_counter()

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [opt.state_dict() for opt in opts],
            "step": step,
            "log": log,
            "seconds": seconds_before + time.perf_counter() - began,
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=rank > 0, refresh_per_second=0.2) as progress:
        task = progress.add_task(stage, total=recipe.num_steps, completed=start)
        for step in range(start, recipe.num_steps):
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = recipe.lr(step)
            windows = corpus.windows(recipe, step, rank, world)
            loss = next_token_loss(model, windows) if target is None else distillation_loss(model, target, windows)
            for opt in opts:
                opt.zero_grad(set_to_none=True)
            loss.backward()
            average_gradients(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
            progress.update(task, advance=1)
            if rank == 0 and ((step + 1) % 200 == 0 or step + 1 == recipe.num_steps):
                seconds = seconds_before + time.perf_counter() - began
                nats = held_out_nats(model, corpus)
                log.append({"step": step + 1, "seconds": seconds, "loss": loss.item(), "held_out_nats": nats})
                progress.console.print(
                    f"{stage} step {step + 1} loss {loss.item():.3f} held-out {nats:.4f} nats/token, {seconds:.0f} s"
                )
                save(step + 1)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def load_stage(work: Path, stage: str, shape: Shape, corpus: Corpus) -> LlamaForCausalLM:
    model = LlamaForCausalLM(shape.config(corpus.vocab_size, corpus.end_of_text))
    model.load_state_dict(torch.load(work / f"{stage}.pt", weights_only=True)["model"])
    return model


def finished(work: Path, stage: str, recipe: Recipe) -> bool:
    path = work / f"{stage}.pt"
    return path.exists() and torch.load(path, weights_only=True)["step"] >= recipe.num_steps


# ------------------------------------------------------------------------------------------------------------ prompts

NUM_PROMPTS_PER_SPLIT = 240
MIN_PROMPT_TOKENS = 128
DEFINITION = re.compile(r"^(?: {4})?(?:async )?(?:def|class) ", re.MULTILINE)


def held_out_texts(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, str]:
    """File name to text, decoded from the corpus so that any interpreter gives the files that were held out."""
    files = np.split(corpus.held_out, np.flatnonzero(corpus.held_out == corpus.end_of_text))[1:]
    return {
        name: tokenizer.decode(ids[1:].tolist())
        for name, ids in zip(corpus.facts["held_out_files"], files, strict=True)
    }


def is_table(text: str) -> bool:
    """A character table and not code: its continuation is a list of numbers."""
    return sum(map(str.isdigit, text)) > 0.1 * len(text)


def excerpts(text: str, tokenizer: Tokenizer) -> list[str]:
    """Excerpts that do not overlap: each starts at a definition and ends with the line of token MIN_PROMPT_TOKENS."""
    found, end = [], 0
    for match in DEFINITION.finditer(text):
        if match.start() < end:
            continue
        rest = text[match.start() :]
        offsets = tokenizer.encode(rest[: 8 * MIN_PROMPT_TOKENS]).offsets
        if len(offsets) < MIN_PROMPT_TOKENS:
            continue
        line_end = rest.find("\n", offsets[MIN_PROMPT_TOKENS - 1][1])
        excerpt = rest if line_end < 0 else rest[: line_end + 1]
        found.append(excerpt)
        end = match.start() + len(excerpt)
    return found


def take_in_turns(queues: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(file, excerpt) with the files taking turns, so that no large file dominates."""
    iterators = {name: iter(queue) for name, queue in queues.items()}
    for name in cycle(list(iterators)):
        if not iterators:
            return
        if name in iterators and (excerpt := next(iterators[name], None)) is not None:
            yield name, excerpt
        else:
            iterators.pop(name, None)


def held_out_prompts(corpus: Corpus, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Rows of prompts.jsonl: NUM_PROMPTS_PER_SPLIT per split.

    The excerpts of every file alternate between the splits, and each split is shuffled: any number of its first rows is
    a sample of one workload. With some thirty files, which differ among themselves, splits without a common file would
    be samples of two workloads.
    """
    texts = held_out_texts(corpus, tokenizer)
    queues: dict[str, list[str]] = {}
    seen: set[tuple[int, ...]] = set()  # excerpts that begin alike are one prompt
    for name, text in texts.items():
        if is_table(text):
            continue
        fresh = []
        for excerpt in excerpts(text, tokenizer):
            beginning = tuple(tokenizer.encode(excerpt).ids[:EVALUATION_PROMPT_TOKENS])
            if beginning not in seen:
                seen.add(beginning)
                fresh.append(excerpt)
        queues[name] = sorted(fresh, key=lambda excerpt: hashlib.sha256(excerpt.encode()).digest())
    names = sorted(name for name in queues if queues[name])
    splits: dict[str, list[dict[str, str]]] = {"calibration": [], "test": []}
    turn = {name: index for index, name in enumerate(names)}  # every other file begins with the other split
    for name, excerpt in take_in_turns({name: queues[name] for name in names}):
        split = ("calibration", "test")[turn[name] % 2]
        splits[split].append({"text": excerpt, "file": name, "split": split})
        turn[name] += 1
    chosen = [row for rows in splits.values() for row in rows[:NUM_PROMPTS_PER_SPLIT]]
    return sorted(chosen, key=lambda row: (row["split"], hashlib.sha256(row["text"].encode()).digest()))


# --------------------------------------------------------------------------------------------------------- evaluation

EVALUATION_PROMPT_TOKENS = 64
EVALUATION_NEW_TOKENS = 128
TOP = (4, 8, 16)
REQUIREMENTS = {
    "nats by which the target is better than the draft": 0.10,
    "acceptance at T=1": 0.65,
    "greedy agreement": 0.70,
}
MAX_WEIGHT_MEGABYTES = 24


def as_packaged(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with its weights rounded to fp16, computing in fp32."""
    return model.half().float().eval()


@torch.no_grad()
def generated_text(target: LlamaForCausalLM, prompts: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    """(num_prompts, prompt + new tokens) the target's own text, sampled at T=1 or greedy."""
    torch.manual_seed(0)
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=EVALUATION_NEW_TOKENS,
        do_sample=sampled,
        top_k=0 if sampled else None,
    )


def counted_positions(text: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """(num_prompts, new tokens) bool: generated up to the first end-of-text, itself included."""
    ends = (text[:, EVALUATION_PROMPT_TOKENS:] == end_of_text).long()
    return ends.cumsum(1) - ends == 0


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, text: torch.Tensor, counted: torch.Tensor
) -> dict[str, float]:
    """How well the draft agrees with the target along the target's own `text`, averaged over the `counted` positions.

    `acceptance` is sum min(p, q) over the vocabulary; `argmax_agreement` counts positions where the draft's most likely
    token is the target's token; `top_F` those where that token is among the draft's F most likely ones. Each comes with
    the standard error over prompts.
    """
    columns: dict[str, list[torch.Tensor]] = {}
    for rows in text.split(16):
        logits = [m(rows[:, :-1]).logits[:, EVALUATION_PROMPT_TOKENS - 1 :] for m in (target, draft)]
        target_probs, draft_probs = (x.softmax(-1) for x in logits)
        token = rows[:, EVALUATION_PROMPT_TOKENS:, None]
        rank = (draft_probs > draft_probs.gather(-1, token)).sum(-1)
        values = {
            "acceptance": torch.minimum(target_probs, draft_probs).sum(-1),
            "argmax_agreement": (rank == 0).float(),
        } | {f"top_{size}": (rank < size).float() for size in TOP}
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    figures: dict[str, float] = {"num_prompts": len(text), "num_tokens": int(counted.sum())}
    for name, parts in columns.items():
        values_by_prompt = torch.cat(parts) * counted
        mean = values_by_prompt.sum() / counted.sum()
        deviation = (values_by_prompt - mean * counted).sum(1)
        figures[name] = mean.item()
        figures[f"{name}_standard_error"] = (deviation.square().sum().sqrt() / counted.sum()).item()
    return figures


def repetition(text: torch.Tensor, counted: torch.Tensor, length: int = 8) -> float:
    """Share of generated runs of `length` tokens that occurred before in the same text."""
    repeated = total = 0
    for row, num_generated in zip(text, counted.sum(1).tolist(), strict=True):
        tokens = row[: EVALUATION_PROMPT_TOKENS + num_generated].tolist()
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - length + 1):
            run = tuple(tokens[start : start + length])
            if start + length > EVALUATION_PROMPT_TOKENS:
                total += 1
                repeated += run in seen
            seen.add(run)
    return repeated / total


def evaluate(work: Path, models: dict[str, LlamaForCausalLM], rows: list[dict[str, str]]) -> dict:
    """Every figure of the model card, on the weights as they are packaged."""
    corpus = Corpus(work)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    tokens_per_byte = len(corpus.held_out) / corpus.facts["held_out_bytes"]
    nats = {name: held_out_nats(m, corpus, limit=None) for name, m in track(models.items(), "held-out text")}
    prompts = torch.tensor([tokenizer.encode(row["text"]).ids[:EVALUATION_PROMPT_TOKENS] for row in rows])
    target = models["target"].eval()
    texts = {
        kind: generated_text(target, prompts, sampled=kind == "sampled")
        for kind in track(("sampled", "greedy"), "the target's own text")
    }
    counted = {kind: counted_positions(text, corpus.end_of_text) for kind, text in texts.items()}
    return {
        "schema": 1,
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "held_out": {
            name: {"nats_per_token": value, "bits_per_byte": value * tokens_per_byte / math.log(2)}
            for name, value in nats.items()
        },
        "held_out_tokens": len(corpus.held_out) // 513 * 512,
        "agreement": {
            name: {kind: agreement(target, models[name].eval(), text, counted[kind]) for kind, text in texts.items()}
            for name in ("draft", "first_draft")
        },
        "repetition": {kind: repetition(text, counted[kind]) for kind, text in texts.items()},
        "training": {stage: training_summary(work, stage) for stage in ("draft", "target", "distil")},
        "corpus": corpus.facts,
        "recipes": json.loads((work / "recipes.json").read_text()),
        "versions": {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__},
    }


def training_summary(work: Path, stage: str) -> dict:
    state = torch.load(work / f"{stage}.pt", weights_only=True)
    return {"num_steps": state["step"], "seconds": state["seconds"], "log": state["log"]}


def check(evaluation: dict, weight_bytes: int) -> list[tuple[str, float, str, bool]]:
    """(what, value, rule, met) for everything that is asked of the pair."""
    held_out, agree = evaluation["held_out"], evaluation["agreement"]["draft"]
    values = (
        held_out["draft"]["nats_per_token"] - held_out["target"]["nats_per_token"],
        agree["sampled"]["acceptance"],
        agree["greedy"]["argmax_agreement"],
    )
    checks = [
        (what, value, f">= {least:.2f}", value >= least)
        for (what, least), value in zip(REQUIREMENTS.items(), values, strict=True)
    ]
    megabytes = weight_bytes / 1e6
    return [*checks, ("weights, MB", megabytes, f"<= {MAX_WEIGHT_MEGABYTES}", megabytes <= MAX_WEIGHT_MEGABYTES)]


# ---------------------------------------------------------------------------------------------------------- packaging


def write_model(model: LlamaForCausalLM, folder: Path) -> int:
    """Write config.json and model.safetensors (fp16, the tied head left out); returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.float16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {n: w.half().contiguous() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    return (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def package(work: Path, folder: Path, departures: str) -> None:
    """Write the pair into `folder` and print what is asked of it; exits with 1 if something is missed."""
    torch.set_num_threads(1)
    corpus = Corpus(work)
    load = partial(load_stage, work, corpus=corpus)
    models = {
        "target": as_packaged(load("target", TARGET_SHAPE)),
        "draft": as_packaged(load("distil", DRAFT_SHAPE)),
        "first_draft": as_packaged(load("draft", DRAFT_SHAPE)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    rows = held_out_prompts(corpus, Tokenizer.from_file(str(work / "tokenizer.json")))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weight_bytes = sum(write_model(models[role], folder / role) for role in ("target", "draft"))
    evaluation = evaluate(work, models, rows)
    checks = check(evaluation, weight_bytes)
    (folder / "evaluation.json").write_text(json.dumps(evaluation | {"weight_bytes": weight_bytes}, indent=1) + "\n")
    (folder / "README.md").write_text(model_card(evaluation, checks, rows, departures))
    for what, value, rule, met in checks:
        print(f"{'met   ' if met else 'MISSED'} {what}: {value:.3f} ({rule})")
    if not all(met for *_, met in checks):
        raise SystemExit(1)


def model_card(
    evaluation: dict, checks: list[tuple[str, float, str, bool]], rows: list[dict[str, str]], departures: str
) -> str:
    corpus, training, recipes = (evaluation[key] for key in ("corpus", "training", "recipes"))
    files = {split: {row["file"] for row in rows if row["split"] == split} for split in ("calibration", "test")}
    agree, repeated = evaluation["agreement"], evaluation["repetition"]
    names = {"target": "target", "draft": "draft (distilled)", "first_draft": "draft before distillation"}

    def quality_row(name: str) -> str:
        nats, bits = evaluation["held_out"][name].values()
        return f"| {names[name]} | {evaluation['parameters'][name] / 1e6:.2f} M | {nats:.4f} | {bits:.4f} |"

    def agreement_row(name: str, kind: str) -> str:
        figures = agree[name][kind]
        keys = ("acceptance", "argmax_agreement", *(f"top_{size}" for size in TOP))
        cells = " | ".join(f"{figures[key]:.3f} ± {figures[f'{key}_standard_error']:.3f}" for key in keys)
        return f"| {names[name]} | {kind} | {cells} |"

    def training_row(stage: str) -> str:
        log, recipe = training[stage]["log"], recipes[stage]
        picks = sorted({round(i * (len(log) - 1) / 5) for i in range(6)})
        curve = ", ".join(f"{log[i]['step']}: {log[i]['held_out_nats']:.3f}" for i in picks)
        steps = f"{training[stage]['num_steps']} of {recipe['num_steps']}"
        return f"| {stage} | {steps} | {recipe['peak_lr']:g} | {training[stage]['seconds'] / 60:.0f} min | {curve} |"

    quality = "\n".join(map(quality_row, names))
    agreements = "\n".join(agreement_row(name, kind) for name in agree for kind in ("sampled", "greedy"))
    stages = "\n".join(map(training_row, training))
    asked = "\n".join(
        f"| {what} | {rule} | {value:.3f} | {'met' if met else '**missed**'} |" for what, value, rule, met in checks
    )
    tokens_a_step = recipes["target"]["batch_size"] * recipes["target"]["window"]
    num_tokens = agree["draft"]["sampled"]["num_tokens"]
    return f"""# The `stdlib` pair

A target and a draft model for speculative decoding, Llama architecture, trained from scratch on the source files of
the Python {corpus["python"]} standard library. The target has {TARGET_SHAPE.num_layers} layers, the draft
{DRAFT_SHAPE.num_layers}, both are of width {DRAFT_SHAPE.hidden_size} and share a byte-level BPE of
{corpus["vocab_size"]} tokens. They are small enough to run, profile and compare on two CPU cores. Every figure below
is written by the packaging stage of the training script and stands in `evaluation.json`.

| asked | rule | value | |
|---|---|---|---|
{asked}

## Quality on held-out files

All {evaluation["held_out_tokens"]:,} tokens in windows of 512, on the fp16 weights as packaged, computed in fp32.

| model | parameters | nats/token | bits/byte |
|---|---|---|---|
{quality}

## Agreement along the target's own text

{len(rows)} held-out prompts of {EVALUATION_PROMPT_TOKENS} tokens, up to {EVALUATION_NEW_TOKENS} new tokens each
({num_tokens:,} tokens sampled); ± is the standard error over prompts. Text: sampled at T=1, or greedy.
Acceptance is the mean of sum min(p, q) at T=1; agreement: the target's token is the draft's most likely one;
top-F: it is among the draft's F most likely ones.

| draft | text | acceptance | agreement | top-{TOP[0]} | top-{TOP[1]} | top-{TOP[2]} |
|---|---|---|---|---|---|---|
{agreements}

Share of generated runs of 8 tokens that occurred before in the same text: {repeated["sampled"]:.2f} sampled,
{repeated["greedy"]:.2f} greedy. Greedy text of a small model repeats itself, and repeated text is easy to draft.

## Training

| stage | steps | peak learning rate | time | held-out nats/token by step (64 windows) |
|---|---|---|---|---|
{stages}

`draft` is trained on next tokens; `target` is grown from it (its layer kept, new layers whose output projections
start at zero); `distil` trains the draft again, towards the target's full distribution, and is the packaged draft.
A step is {tokens_a_step:,} tokens; Muon for the layers' matrices, AdamW for the rest; warm-up, then a cosine to a
twentieth of the peak. torch {evaluation["versions"]["torch"]}, transformers {evaluation["versions"]["transformers"]}.

{departures}

    python experiments/scripts/train_stdlib_pair.py --workers 2
    python experiments/scripts/train_stdlib_pair.py --package-only

## Data

The library's `*.py` files without its tests: {corpus["num_train_files"]} files
({corpus["train_bytes"] / 1e6:.1f} MB) for training, {corpus["num_held_out_files"]}
({corpus["held_out_bytes"] / 1e6:.2f} MB) held out. A file is held out when the SHA-256 of its name, as an integer, is
divisible by {HELD_OUT_ONE_IN}. `prompts.jsonl` holds {len(rows)} excerpts of held-out files, each starting at a
definition and at least {MIN_PROMPT_TOKENS} tokens long. The excerpts of a file alternate between the splits
`calibration` (from {len(files["calibration"])} files) and `test` ({len(files["test"])} files): no excerpt is in both,
and both are samples of one workload. Character tables are left out.

## Limits

- Toy models: they continue Python-looking text and know nothing. Their use is that both are real, agree for real
  reasons and differ in quality.
- At most 512 tokens of context; one kind of text. On other text or at another temperature acceptance is different.
- Held out is by file: idioms, licence texts and sibling modules occur on both sides.

## Licence

The weights are under the project's MIT licence. The prompts are excerpts of the Python standard library,
© Python Software Foundation, licensed under PSF-2.0.
"""


# ------------------------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/training"), help="checkpoints and logs")
    parser.add_argument("--workers", type=int, default=1, help="processes that share each step, one core each")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--draft-steps", type=int, default=2500)
    parser.add_argument("--target-steps", type=int, default=2000)
    parser.add_argument("--distil-steps", type=int, default=1500)
    parser.add_argument("--stop-after", choices=["corpus", "draft", "target", "distil", "package"], default="package")
    parser.add_argument("--package-only", action="store_true", help="package the checkpoints as they are")
    parser.add_argument("--departures", default="", help="what the card must say about how the run left the recipe")
    parser.add_argument("--pair-folder", type=Path, default=PAIR_FOLDER, help="where the packaged pair is written")
    args = parser.parse_args()
    if args.package_only:
        package(args.work, args.pair_folder, args.departures)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    recipes = {
        "draft": Recipe(args.draft_steps, batch_size=8, window=512, peak_lr=6e-3, warmup_steps=100, seed=1),
        "target": Recipe(args.target_steps, batch_size=8, window=512, peak_lr=2e-3, warmup_steps=300, seed=2),
        "distil": Recipe(args.distil_steps, batch_size=8, window=512, peak_lr=3e-3, warmup_steps=50, seed=3),
    }
    prepare_corpus(args.work, args.vocab_size)
    (args.work / "recipes.json").write_text(json.dumps({k: asdict(v) for k, v in recipes.items()}, indent=1))
    for stage, recipe in recipes.items():
        if args.stop_after == "corpus":
            return
        if not finished(args.work, stage, recipe):
            arguments = (args.workers, args.work, stage, recipe)
            if args.workers == 1:
                run_stage(0, *arguments)
            else:
                mp.spawn(run_stage, args=arguments, nprocs=args.workers)
        if stage == args.stop_after:
            return
    package(args.work, args.pair_folder, args.departures)


if __name__ == "__main__":
    main()
