"""Peak memory of the distillation loss, measured and predicted, fused against whole logits.

    python -m dspark_eval.loss_memory --vocab 163840 --hidden 2560 --blocks 512 --slots 7

One forward and backward pass over random states, every slot supervised. Counted is what the pass
allocates on top of what exists before it: states, LM head and the sequential head's weights.
On a GPU the allocator's peak, on the CPU the peak of the profiler's record of allocations.

Letters: n slots, c slots of a chunk, D hidden, V vocabulary, R markov rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.distill.loss import chunk_slots, distill_loss
from dspark.distill.terms import Objective
from dspark.draft.heads import VanillaMarkovHead
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark_eval.busy import say_warnings
from dspark_eval.environment import heading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
METHODS = ("fused", "whole")


@dataclass(frozen=True)
class LossSize:
    """What a measurement runs at. `chunk` None: as many slots as the loss picks by bytes."""

    vocab: int = 163_840
    hidden: int = 2_560
    rank: int = 256
    blocks: int = 512
    slots: int = 7
    chunk: int | None = None
    dtype: str = "bfloat16"

    @property
    def total_slots(self) -> int:
        """n."""
        return self.blocks * self.slots

    def chunk_on(self, device: torch.device) -> int:
        """c: whole blocks, as the loss cuts them."""
        chunk = self.chunk or chunk_slots(self.vocab, device)
        return min(max(chunk // self.slots, 1) * self.slots, self.total_slots)


def predicted_bytes(size: LossSize, device: torch.device) -> int:
    """Peak of the fused loss.

    Of a chunk: drafter's and target's logits in the head's dtype where that is not fp32, three fp32
    buffers (drafter, target, gap) and the gradient in the head's dtype. For the whole batch: the
    gradients of states, codes and W2, in the backward pass a second time, scaled; in the forward
    pass beside the picked states (drafter's twice, target's) and codes. Vectors are left out.
    """
    half = torch.finfo(DTYPES[size.dtype]).bits // 8 if size.dtype != "float32" else 0
    chunk = size.chunk_on(device) * size.vocab * (3 * 4 + half)
    weight = size.vocab * size.rank * 4
    rows = size.total_slots * 4
    forward = chunk + weight + rows * (4 * size.hidden + 3 * size.rank)
    backward = 2 * weight + rows * (3 * size.hidden + size.rank)
    return max(forward, backward)


def measure(size: LossSize, device: torch.device, method: str) -> dict[str, Any]:
    """Peak bytes, and seconds, of one pass after a first; `method` is one of `METHODS`."""
    step = _step(size, device, method)
    step()  # workspaces of the matmul library stay allocated
    gc.collect()
    peak, seconds = (_run_cuda if device.type == "cuda" else _run_cpu)(step)
    return {"method": method, "peak_bytes": peak, "seconds": seconds}


def _step(size: LossSize, device: torch.device, method: str) -> Callable[[], None]:
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (size.blocks, size.slots), DTYPES[size.dtype]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    hidden = normal(*shape, size.hidden).requires_grad_(True)
    target_hidden = normal(*shape, size.hidden)
    head = (normal(size.vocab, size.hidden) * size.hidden**-0.5).to(dtype)
    markov = VanillaMarkovHead(size.vocab, size.rank).to(device)
    ids = torch.randint(size.vocab, (2, *shape), generator=generator, device=device)
    supervised = torch.ones(shape, dtype=torch.bool, device=device)

    def to_logits(states: Tensor) -> Tensor:
        return F.linear(states.to(dtype), head).float()

    prev, labels = ids

    def fused() -> None:
        distill_loss(
            hidden, target_hidden, prev, labels, supervised, to_logits=to_logits,
            markov_head=markov, confidence_head=None, objective=Objective(), chunk=size.chunk,
        ).objective.backward()  # fmt: skip

    def whole() -> None:
        _whole_loss(hidden, target_hidden, prev, labels, to_logits, markov).backward()

    def step() -> None:
        (fused if method == "fused" else whole)()
        hidden.grad = None
        markov.zero_grad(set_to_none=True)

    return step


def _whole_loss(
    hidden: Tensor, target_hidden: Tensor, prev: Tensor, labels: Tensor,
    to_logits: Callable[[Tensor], Tensor], markov: VanillaMarkovHead,
) -> Tensor:  # fmt: skip
    """The plain loss: all logits of drafter and target, autograd through both softmaxes."""
    log_q = (to_logits(hidden) + markov.bias(markov.embed(prev))).log_softmax(-1)
    with torch.no_grad():
        p = to_logits(target_hidden).softmax(-1)
    ce = -log_q.gather(-1, labels[..., None])[..., 0]
    weight = torch.exp(-torch.arange(hidden.shape[1], device=hidden.device) / 4.0)
    return (weight * (0.1 * ce + 0.9 * (log_q.exp() - p).abs().sum(-1))).sum()


def _run_cuda(step: Callable[[], None]) -> tuple[int, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, time.perf_counter() - started


def _run_cpu(step: Callable[[], None]) -> tuple[int, float]:
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, seconds


def report(size: LossSize, device: torch.device, methods: tuple[str, ...]) -> dict[str, Any]:
    """Measurements of `methods`, with the prediction for the fused loss; bytes are bytes."""
    return {
        **asdict(size),
        "chunk": size.chunk_on(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "predicted_bytes": predicted_bytes(size, device),
        "whole_logits_bytes": size.total_slots * size.vocab * 4,
        "measured": [measure(size, device, method) for method in methods],
    }


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure, and print the numbers as JSON."""
    parser = Parser(prog="python -m dspark_eval.loss_memory", description=__doc__)
    for name in ("vocab", "hidden", "rank", "blocks", "slots"):
        parser.add_argument(f"--{name}", type=int, default=getattr(LossSize, name))
    parser.add_argument("--chunk", type=int, help="slots whose logits exist at once")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the LM head")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--whole", action="store_true", help="also the plain loss, all logits")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = vars(parser.parse_args(arguments))
    device, whole, file = given.pop("device"), given.pop("whole"), given.pop("json")
    low = [name for name, value in given.items() if isinstance(value, int) and value < 1]
    if low:
        raise UserError(f"--{low[0]} is {given[low[0]]}: expected at least 1")
    size, place = LossSize(**given), find_device(device, "--device")
    facts = heading("loss_memory", arguments, None, place, DTYPES[size.dtype])
    say_warnings(facts)
    result = {**facts, **report(size, place, METHODS[: 1 + whole])}
    if file is not None:
        atomic_write_json(file, result)
    typer.echo(json.dumps(result, indent=2))


if __name__ == "__main__":
    sys.exit(main())
