"""Training of k3-nano: the recipe behind the shipped weights.

    python -m dspark.nano.train --out runs/nano --device cuda

writes the checkpoint to ``runs/nano/k3-nano``. Seeded and resumable: rows are a pure function of
the seed, the batch of a step is a pure function of (seed, step), and everything else a step
depends on is saved every ``save_every`` steps. On one GPU the defaults take about 15 minutes; on a
CPU they take days.

Loss: cross-entropy of the next token, weight 1 on the assistant's tokens (end of message included)
and ``prompt_weight`` on the user's. AdamW, linear warm-up, cosine to zero; float32 with TF32
products.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.console import Parser, module_command
from dspark.errors import UserError
from dspark.files import atomic_folder, read_json
from dspark.k3.checkpoint import save_k3
from dspark.k3.kda import KDA
from dspark.k3.mla import MLA
from dspark.k3.model import K3ForCausalLM
from dspark.k3.moe import LatentMoE
from dspark.nano.architecture import nano_config
from dspark.nano.corpus import Corpus, load_tokenizer
from dspark.seeds import seed_argument


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    steps: int = 4600
    rows_per_step: int = 512
    length: int = 176
    """Tokens per row, padded; longer rows are left out of the corpus."""
    corpus_rows: int = 600_000
    peak_lr: float = 3e-3
    warmup_steps: int = 150
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    prompt_weight: float = 0.1

    def lr(self, step: int) -> float:
        """Learning rate of step 0, 1, ..: linear to the peak, then cosine to zero."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def batch_rows(recipe: Recipe, rows: int, step: int) -> Tensor:
    """Row ids of a step: the corpus in a new seeded order every epoch."""
    per_epoch = rows // recipe.rows_per_step
    epoch, place = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(rows, generator=generator)
    return order[place * recipe.rows_per_step : (place + 1) * recipe.rows_per_step]


def loss_of(
    model: K3ForCausalLM, tokens: Tensor, prompt_lengths: Tensor, pad: int, prompt_weight: float
) -> Tensor:
    """Weighted mean next-token loss of rows [B, length + 1]; position i is the user's if i <
    prompt length."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    hidden, _ = model(inputs)
    logits = model.lm_head(hidden).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    place = torch.arange(1, tokens.shape[1], device=tokens.device)
    weights = torch.where(place < prompt_lengths.unsqueeze(1), prompt_weight, 1.0) * (labels != pad)
    return (losses * weights).sum() / weights.sum()


def parameter_groups(model: K3ForCausalLM, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices only: not on norms, biases, decay rates, convolutions or queries."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            matrix = p.dim() > 1 and "conv1d" not in name and "res_proj" not in name
            (decayed if matrix else plain).append(p)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def compile_regions(model: K3ForCausalLM) -> None:
    """Compile mixers and MLPs one by one: layers of one kind share a graph, so it takes seconds.

    The whole model as one graph took minutes to compile on an H200, for the unrolled chunk loops.
    """
    for module in model.modules():
        if isinstance(module, (KDA, MLA, LatentMoE)):
            module.compile(dynamic=False)


class Run:
    """A training run with its state on disk."""

    def __init__(self, recipe: Recipe, out: Path, device: torch.device) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.tokenizer = load_tokenizer()
        self.pad = self.tokenizer.pad_token_id
        config = nano_config(
            vocab_size=len(self.tokenizer),
            bos=self.tokenizer.bos_token_id,
            eos=self.tokenizer.eos_token_id,
            pad=self.pad,
        )
        self.model = K3ForCausalLM(config)
        self.model.init_weights(torch.Generator().manual_seed(recipe.seed))
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, recipe.weight_decay),
            lr=recipe.peak_lr,
            betas=(recipe.beta1, recipe.beta2),
            fused=device.type == "cuda",
        )
        self.step = 0

    def save(self) -> None:
        """Write weights, moments and step; an interrupted write leaves the previous state."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                tensors[f"{key}.{name}"] = value
        with atomic_folder(self.out / "state") as folder:
            save_file(
                {k: v.contiguous().cpu() for k, v in tensors.items()}, folder / "state.safetensors"
            )
            meta = {"step": self.step, "recipe": asdict(self.recipe)}
            (folder / "state.json").write_text(json.dumps(meta, indent=2))

    def resume(self) -> None:
        """Continue from the saved state.

        Raises:
            UserError: the state belongs to another recipe.
        """
        folder = self.out / "state"
        meta = read_json(folder / "state.json")
        if meta["recipe"] != asdict(self.recipe):
            raise UserError(
                f"{folder}: saved with another recipe; start a new --out, or repeat its options"
            )
        tensors = load_file(folder / "state.safetensors", device=str(self.device))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(tensors[f"model.{name}"])
                moments = {
                    k: tensors[f"{k}.{name}"]
                    for k in ("exp_avg", "exp_avg_sq")
                    if f"{k}.{name}" in tensors
                }
                if moments:
                    self.optimizer.state[p] = {"step": tensors[f"step.{name}"], **moments}
        self.step = meta["step"]

    def train(self, *, save_every: int, stop_after_s: float | None, compiled: bool) -> bool:
        """Train to the recipe's last step, or stop in time; says whether it is complete."""
        torch.set_float32_matmul_precision("high")
        corpus = Corpus.build(
            self.tokenizer, self.recipe.seed, self.recipe.corpus_rows, self.recipe.length
        )
        print(f"corpus: {len(corpus)} rows, {corpus.mean_length:.0f} tokens on average", flush=True)
        corpus = corpus.to(self.device)
        if compiled:
            compile_regions(self.model)
        start = last = time.perf_counter()
        while self.step < self.recipe.steps:
            loss = self._update(corpus)
            if self.step % 50 == 0:
                now = time.perf_counter()
                rate = 50 * self.recipe.rows_per_step * self.recipe.length / (now - last)
                print(f"step {self.step}: loss {loss.item():.4f}, {rate:,.0f} tokens/s", flush=True)
                last = now
            if self.step % save_every == 0:
                self.save()
            if stop_after_s is not None and time.perf_counter() - start > stop_after_s:
                break
        self.save()
        return self.step == self.recipe.steps

    def _update(self, corpus: Corpus) -> Tensor:
        rows = batch_rows(self.recipe, len(corpus), self.step).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr(self.step)
        loss = loss_of(
            self.model,
            corpus.tokens[rows].long(),
            corpus.prompt_lengths[rows],
            self.pad,
            self.recipe.prompt_weight,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def export(self) -> Path:
        """Write the checkpoint in the published layout, bfloat16, beside a copy of the
        tokenizer."""
        folder = self.out / "k3-nano"
        with atomic_folder(folder) as staging:
            save_k3(staging, self.model, experts="plain", dtype=torch.bfloat16)
            self.tokenizer.save_pretrained(staging)
        return folder


@module_command
def main(arguments: Sequence[str]) -> None:
    """Train, or go on."""
    parser = Parser(
        prog="python -m dspark.nano.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=seed_argument, default=Recipe.seed)
    parser.add_argument("--corpus-rows", type=int, default=Recipe.corpus_rows)
    parser.add_argument("--rows-per-step", type=int, default=Recipe.rows_per_step)
    parser.add_argument("--peak-lr", type=float, default=Recipe.peak_lr)
    parser.add_argument("--save-every", type=int, default=500, help="steps between saved states")
    parser.add_argument("--stop-after", type=float, help="seconds after which to save and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the saved state")
    parser.add_argument(
        "--no-compile", action="store_true", help="run the model without torch.compile"
    )
    args = parser.parse_args(arguments)
    recipe = replace(
        Recipe(),
        steps=args.steps,
        seed=args.seed,
        corpus_rows=args.corpus_rows,
        rows_per_step=args.rows_per_step,
        peak_lr=args.peak_lr,
    )
    _run(recipe, args)


def _run(recipe: Recipe, args: argparse.Namespace) -> None:
    run = Run(recipe, args.out, torch.device(args.device))
    if args.resume:
        run.resume()
    complete = run.train(
        save_every=args.save_every, stop_after_s=args.stop_after, compiled=not args.no_compile
    )
    if complete:
        print(f"complete: {run.export()}")
    else:
        print(f"stopped at step {run.step}; continue with --resume")


if __name__ == "__main__":
    sys.exit(main())
