"""Time of one draft step over the length of the context, for each backbone.

    python -m dspark_eval.draft_step --contexts 1024 32768 1048576

A step is what a round asks of the drafter: embeddings of [anchor, mask, ..], the backbone against
its context, the target's LM head on all slots, the sequential head slot by slot. The default sizes
are K3's: the widths of the published K3 drafters, 5 layers, vocabulary 163,840, bf16. Weights and
contexts are random numbers: nothing here depends on what they say. On a GPU the step is one CUDA
graph; elsewhere it runs eagerly, for which smaller sizes exist.

    read    bytes of weights and context that the step must read
    floor   read / copy rate, which the same run measures
    ratio   time over the time of the same backbone at the shortest context
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from dspark import ops
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.attention_context import AttentionContext
from dspark.draft.context import DraftContext
from dspark.draft.kda_context import KDAContext
from dspark.draft.kinds import BACKBONES
from dspark.draft.mla_context import MLAContext
from dspark.draft.shapes import KDAShape, MLAShape
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.seeds import seed_argument
from dspark_eval.busy import say_warnings
from dspark_eval.environment import heading

HEADS = {"attention": (64, 16, 64), "mla": (64, 64, 192), "kda": (64, 64, 128)}
"""Query heads, key heads and head dim at K3's size."""
COPY_BYTES = 2**31


def drafter_config(
    backbone: str, hidden: int, layers: int, vocab: int, block: int, shrink: int
) -> DraftConfig:
    """The shape of a published K3 drafter (`kda`: ours, as wide), smaller by `shrink`."""
    heads, key_heads, width = HEADS[backbone]
    latent = MLAShape(1536 // shrink, 512 // shrink, 128 // shrink, 64 // shrink, 128 // shrink)
    return DraftConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads // shrink,
        num_key_value_heads=max(1, key_heads // shrink),
        head_dim=max(2, width // shrink),
        intermediate_size=2 * hidden,
        vocab_size=vocab,
        num_target_layers=93,
        target_layer_ids=(2, 23, 47, 71, 89),
        target_tap_kind="attn_res_mixture",
        mask_token_id=vocab - 1,
        block_size=block,
        max_position_embeddings=2**20 + 64,
        backbone=backbone,
        mla=latent if backbone == "mla" else None,
        kda=KDAShape(order=0, gate_rank=128 // shrink) if backbone == "kda" else None,
    )


class DraftStep:
    """A drafter, the target's head, and the step of both at a context of any length."""

    def __init__(self, config: DraftConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.drafter = DSparkDrafter(config).eval()
                self.head = torch.randn(config.vocab_size, config.hidden_size).mul_(0.02)
                self.anchor = torch.randint(config.vocab_size, (1,))
        finally:
            torch.set_default_dtype(before)
        mask = torch.full((1, config.block_size - 1), config.mask_token_id, device=device)
        self.block = torch.cat((self.anchor[:, None], mask), 1)

    def context(self, length: int) -> DraftContext:
        """A context that holds `length` positions of random numbers."""
        context = self.drafter.new_context(1, length)
        for buffer in _buffers(context):
            buffer.normal_(std=0.1)
        context.row_lengths = [length]
        return context

    def bytes_read(self, context: DraftContext) -> int:
        """Of weights and context, each once; of the sequential head's table once per slot."""
        drafter, slots = self.drafter, self.config.block_size
        read = _nbytes([*drafter.layers.parameters(), self.head, *_buffers(context)])
        table = _nbytes([drafter.markov_head.markov_w2.weight])
        return read + slots * table

    @torch.no_grad()
    def run(self, context: DraftContext) -> Tensor:
        """Token ids [1, G], greedy."""
        drafter, heads = self.drafter, self.drafter.markov_head
        hidden = drafter.block_hidden(F.embedding(self.block, self.head), context)
        logits = F.linear(hidden, self.head)
        confidence = drafter.confidence_head
        assert confidence is not None
        tables = heads.markov_w1.weight, heads.markov_w2.weight
        return ops.markov_sample(
            logits, self.anchor, *tables, hidden=hidden,
            confidence=(confidence.proj.weight, confidence.proj.bias),
        ).tokens  # fmt: skip


def _buffers(context: DraftContext) -> list[Tensor]:
    if isinstance(context, AttentionContext):
        return [tensor for each in context.buffers for tensor in (each.keys, each.values)]
    if isinstance(context, MLAContext):
        return list(context.latents)
    assert isinstance(context, KDAContext)
    return [context.state, context.window]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def times(step: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` steps; replays of one graph on a GPU."""
    if device.type != "cuda":
        step()
        return [_seconds(step) for _ in range(repeats)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels compile and tune before anything is captured
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    del kept
    return found


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = COPY_BYTES if device.type == "cuda" else 2**26
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(times(lambda: target.copy_(source), device, 10))


def measure(step: DraftStep, lengths: Sequence[int], repeats: int, rate: float) -> Iterator[dict]:
    """One row per context length, shortest first."""
    shortest = None
    for length in sorted(lengths):
        context = step.context(length)
        taken = sorted(times(partial(step.run, context), step.device, repeats))
        middle = median(taken)
        shortest = shortest or middle
        read = step.bytes_read(context)
        yield {
            "backbone": step.config.backbone,
            "context": length,
            "read_bytes": read,
            "context_bytes": context.nbytes,
            "floor_s": read / rate,
            "median_s": middle,
            "p99_s": taken[min(len(taken) - 1, int(0.99 * len(taken)))],
            "share_of_copy": read / rate / middle,
            "over_shortest": middle / shortest,
        }
        del context


@module_command
def main(arguments: Sequence[str]) -> None:
    """Print a table and optionally write the rows as JSON."""
    parser = Parser(
        prog="python -m dspark_eval.draft_step",
        description="Draft step time over the length of the context.",
    )
    parser.add_argument("--backbones", nargs="+", default=["attention", "mla", "kda"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768, 1_048_576])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=163_840)
    parser.add_argument("--block", type=int, default=8, help="slots of a block")
    parser.add_argument("--shrink", type=int, default=1, help="divide heads and head widths by it")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=seed_argument, default=0, help="of weights and contexts")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    unknown = [name for name in given.backbones if name not in BACKBONES]
    if unknown:
        raise UserError(f"--backbones: {unknown[0]!r}: expected some of {', '.join(BACKBONES)}")
    if min(*given.contexts, given.repeats, given.shrink) < 1:
        raise UserError("--contexts, --repeats and --shrink: expected at least 1")
    device = find_device(given.device, "--device")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = heading("draft_step", arguments, given.seed, device, dtype)
    say_warnings(facts)
    torch.manual_seed(given.seed)
    rate = copy_rate(device)
    rows: list[dict[str, Any]] = []
    typer.echo(
        f"{'backbone':<10}{'context':>9}{'read MB':>10}{'floor us':>10}{'us':>10}{'p99':>10}"
        f"{'of copy':>9}{'ratio':>7}"
    )
    ops.forget()
    for name in given.backbones:
        sizes = given.hidden, given.layers, given.vocab, given.block, given.shrink
        step = DraftStep(drafter_config(name, *sizes), device, dtype)
        for row in measure(step, given.contexts, given.repeats, rate):
            rows.append(row)
            typer.echo(
                f"{name:<10}{row['context']:>9}{row['read_bytes'] / 1e6:>10.0f}"
                f"{row['floor_s'] * 1e6:>10.0f}{row['median_s'] * 1e6:>10.0f}"
                f"{row['p99_s'] * 1e6:>10.0f}{row['share_of_copy']:>9.2f}"
                f"{row['over_shortest']:>7.2f}"
            )
        del step
    typer.echo(f"copy rate {rate / 1e12:.2f} TB/s; ran {ops.ran()}")
    if given.json is not None:
        document = {**facts, "copy_bytes_per_s": rate, "ran": ops.ran(), "rows": rows}
        atomic_write_json(given.json, document)


if __name__ == "__main__":
    sys.exit(main())
