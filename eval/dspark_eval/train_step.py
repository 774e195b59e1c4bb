"""Time and memory of one training step of a drafter, by part, through the trainer itself.

    python -m dspark_eval.train_step --device cuda

The defaults are Qwen3-4B: hidden 2560, 5 layers, vocabulary 151,936, one row of 4,096 tokens with
512 anchors of 7 slots, all supervised. Rows, target states and weights are random; the target is
its embedding and LM head, since its own pass is not what is measured (`cache.mode=disk` reads it).
Peak memory is what the allocator held at most, weights, moments, target's head and states included.

    forward    blocks, fc and layers up to the drafter's states
    loss       both LM heads, both softmaxes, terms, and the gradient down to the drafter's states
    backward   through the layers
    update     norm, clipping, AdamW

`ms` is the median from a step's first to its last operation on the device, `mean` counts what lies
between steps too.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from dspark import ops
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.distill import objective
from dspark.distill.chat import TrainingRow
from dspark.distill.loss import distill_loss
from dspark.distill.presets import preset_overrides
from dspark.distill.processes import Processes
from dspark.distill.train_settings import TrainSettings
from dspark.distill.trainer import Trainer
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.files import atomic_write_json
from dspark_eval.busy import say_warnings
from dspark_eval.environment import heading
from dspark_eval.train_step_peer import measure_plain
from dspark_eval.train_step_target import HeadTarget, random_states

PARTS = ("forward", "loss", "backward", "update")
WARM_UP = 3


@dataclass(frozen=True)
class StepSize:
    """What a step runs at: a drafter, and `rows` rows of `length` tokens with `anchors` each."""

    vocab: int = 151_936
    hidden: int = 2_560
    layers: int = 5
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    ffn: int = 9_728
    rank: int = 256
    taps: int = 5
    slots: int = 7
    rows: int = 1
    length: int = 4_096
    anchors: int = 512

    def drafter(self, device: torch.device) -> DSparkDrafter:
        """Fresh weights, float32."""
        config = DraftConfig(
            hidden_size=self.hidden, num_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads, head_dim=self.head_dim,
            intermediate_size=self.ffn, vocab_size=self.vocab, num_target_layers=4 * self.taps,
            target_layer_ids=tuple(range(1, 4 * self.taps, 4)), target_tap_kind="residual",
            mask_token_id=0, block_size=self.slots, markov_rank=self.rank, rope_theta=1e6,
            max_position_embeddings=40_960,
        )  # fmt: skip
        with device:
            return DSparkDrafter(config)

    def text(self) -> list[TrainingRow]:
        """Random rows of which every token but the first is the target's."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab, (self.rows, self.length), generator=generator)
        mask = [False] + [True] * (self.length - 1)
        return [TrainingRow(tuple(row), tuple(mask)) for row in ids.tolist()]


def settings(size: StepSize, moments: str, steps: int) -> TrainSettings:
    """DeepSpec's recipe in bf16, one row a step, as many steps as are timed."""
    recipe = {
        key.removeprefix("train."): value
        for key, value in preset_overrides("deepspec").items()
        if key.startswith("train.")
    }
    recipe |= {
        "anchors": size.anchors, "precision": "bf16", "moments": moments, "keep_gib": 0.0,
        "rows_per_step": size.rows, "micro_rows": size.rows, "max_steps": steps, "epochs": steps,
    }  # fmt: skip
    return TrainSettings(**recipe)


def make_trainer(size: StepSize, device: torch.device, moments: str, steps: int) -> Trainer:
    """Of fresh weights, for `steps` steps; the same every time."""
    torch.manual_seed(0)
    drafter = size.drafter(device)
    target = HeadTarget(size.vocab, size.hidden, device)
    states = random_states(size.rows, size.length, size.taps, size.hidden, device)
    recipe = settings(size, moments, steps)
    return Trainer(target, drafter, size.text(), recipe, Processes(device), lambda _: states)


def measure(size: StepSize, device: torch.device, moments: str, steps: int) -> dict[str, Any]:
    """Median step and parts in milliseconds, and peak bytes, after a warm-up."""
    trainer = make_trainer(size, device, moments, steps + WARM_UP)
    clock = Clock(device)
    ops.forget()
    with clock.parts_of(trainer):
        for step in range(WARM_UP):
            trainer.run_step(step)
        clock.restart()
        for step in range(WARM_UP, WARM_UP + steps):
            clock.begin()
            result = trainer.run_step(step)
            clock.end()
    return {
        "moments": moments,
        "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "loss": float(result.sums.loss()),
        "peak_bytes": clock.peak(),
        **clock.medians(),
        "ops": ops.ran(),
    }


class Clock:
    """Marks the borders between parts of a step, on the device where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[list[Any]] = []

    def restart(self) -> None:
        """Forget the warm-up."""
        self.marks = []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        """A step begins."""
        self.marks.append([])
        self.mark()

    def mark(self) -> None:
        """One part ends and the next begins."""
        if not self.marks:
            return
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[-1].append(event)
        else:
            self.marks[-1].append(_HostEvent())

    def end(self) -> None:
        """A step ends."""
        self.mark()

    def medians(self) -> dict[str, Any]:
        """Median milliseconds of a step and of its parts; fastest and slowest step; and the mean of
        all with what lies between them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        whole = sorted(marks[0].elapsed_time(marks[-1]) for marks in self.marks)
        parts = {
            name: median(marks[at].elapsed_time(marks[at + 1]) for marks in self.marks)
            for at, name in enumerate(PARTS)
        }
        return {
            "ms": median(whole), "fastest_ms": whole[0], "slowest_ms": whole[-1], "parts_ms": parts,
            "mean_ms": self.marks[0][0].elapsed_time(self.marks[-1][-1]) / len(self.marks),
        }  # fmt: skip

    def peak(self) -> int | None:
        """Most bytes that were allocated since `restart`; None where nobody counts."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None

    @contextmanager
    def parts_of(self, trainer: Trainer) -> Iterator[None]:
        """Inside, steps of `trainer` mark the borders of `PARTS`."""
        gradients = trainer.optimiser.gradients
        finished: Callable[[], None] = gradients.measure

        def _timed(*arguments: Any, **named: Any) -> Any:
            self.mark()
            sums = distill_loss(*arguments, **named)
            self.mark()
            return sums

        def measured() -> None:
            self.mark()
            finished()

        loss = patch.object(objective, "distill_loss", _timed)
        with loss, patch.object(gradients, "measure", measured):
            yield


class _HostEvent:
    def __init__(self) -> None:
        self.at = perf_counter()

    def elapsed_time(self, later: _HostEvent) -> float:
        return (later.at - self.at) * 1e3


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = Parser(prog="python -m dspark_eval.train_step", description=__doc__)
    for name, value in asdict(StepSize()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", default="cuda", help="cpu | cuda")
    parser.add_argument("--steps", type=int, default=20, help="timed, after three others")
    parser.add_argument("--moments", nargs="+", default=["fp32", "bf16", "int8"])
    parser.add_argument("--plain", action="store_true", help="also the step as recipes publish it")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    device = find_device(options.device, "--device")
    size = StepSize(**{name: getattr(options, name) for name in asdict(StepSize())})
    facts = heading("train_step", arguments, None, device, torch.bfloat16)
    say_warnings(facts)
    found = []
    for moments in options.moments:
        found.append(measure(size, device, moments, options.steps))
        gc.collect()
    plain = measure_plain(size, device, options.steps, WARM_UP) if options.plain else None
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    document = {**facts, "size": asdict(size), "steps": found, "plain": plain}
    print(f"{name}, torch {torch.__version__}; {json.dumps(asdict(size))}")
    print(f"{'moments':>9}{'ms':>9}{'mean':>9}{'GB':>8}" + "".join(f"{part:>10}" for part in PARTS))
    for each in found:
        parts = "".join(f"{each['parts_ms'][part]:>10.2f}" for part in PARTS)
        peak = "-" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 1e9:.2f}"
        print(f"{each['moments']:>9}{each['ms']:>9.2f}{each['mean_ms']:>9.2f}{peak:>8}{parts}")
    if plain is not None:
        print(f"{'plain':>9}{plain['ms']:>9.2f}{'':>9}{plain['peak_bytes'] / 1e9:>8.2f}")
    if options.json:
        atomic_write_json(options.json, document)


if __name__ == "__main__":
    sys.exit(main())
