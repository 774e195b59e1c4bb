"""Predict plain and speculative speed from bytes: on your machine, and for Kimi K3 on many GPUs.

    t(n) = bytes(n) / (GPUs x rate x share) + wait          a target pass of n rows
    d    = draft bytes / (rate x draft GPUs x share) + draft wait
    tokens/s = tau(g) / (t(1 + g) + d)                      with draft length g

`bytes(n)` is `dspark.k3.cost.pass_bytes`: shared weights once, the distinct experts of n rows,
states, latents. Rows of one text choose experts that agree more than chance; `agreement` in [0, 1]
moves their number from independent even choice (0) to one row's (1). `share` is the part of the
memory rate that a pass reaches and `wait` what a pass costs beside its bytes (launches, exchange
between GPUs). Both are measured, or fitted to a published time; a projection says which. Layers
that were measured one by one (`dspark_eval.k3_layers`) give a wait for each number of rows.

    python -m dspark_eval.projection --gpus 8 --rate 8.0 --plain-ms 8.51 --conditional 0.85 0.8 0.75
    python -m dspark_eval.projection --gpus 8 --layers layers.json --conditional 0.85 0.8 0.75

Letters: n rows, g draft length, tau accepted length.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dspark.console import Parser, module_command
from dspark.draft.config import DraftConfig
from dspark.draft.cost import context_bytes, weight_bytes
from dspark.draft.shapes import MLAShape
from dspark.draft.speedup import Prediction, predict
from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.k3.cost import pass_bytes
from dspark.runtime.cost_model import interpolate
from dspark_eval.measured_layers import load_layers

K3 = K3Config(
    vocab_size=163_840,
    hidden_size=7168,
    num_hidden_layers=93,
    full_attention_layers=(*range(3, 92, 4), 92),
    num_attention_heads=96,
    intermediate_size=33_792,
    kda_num_heads=96,
    kda_head_dim=128,
    q_lora_rank=1536,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    expert_quantization="mxfp4",
)
"""Sizes of Kimi K3's text decoder, of its published configuration."""

K3_DRAFTER = DraftConfig(
    hidden_size=7168,
    backbone="mla",
    num_layers=5,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=163_840,
    num_target_layers=93,
    target_layer_ids=(2, 23, 47, 71, 89),
    target_tap_kind="attn_res_mixture",
    mask_token_id=163_837,
    block_size=8,
    mla=MLAShape(1536, 512, 128, 64, 128),
)
"""Sizes of the published MLA drafter for it."""


@dataclass(frozen=True)
class Machine:
    """What a pass meets. Refusals name the options of the command that it is made from.

    gpus        number of GPUs that share every weight of the target
    rate        bytes per second of one GPU's memory, as a large copy reaches it
    share       part of that which a pass reaches, in (0, 1]
    wait_s      seconds of a target pass beside its bytes
    draft_gpus  GPUs that share the drafter
    draft_wait_s  seconds of a draft step beside its bytes
    row_waits   (rows, seconds) that a target pass of so many rows waits on top; interpolated
    """

    gpus: int = 8
    rate: float = 4.2e12
    share: float = 1.0
    wait_s: float = 0.0
    draft_gpus: int = 8
    draft_wait_s: float = 0.0
    row_waits: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("--gpus", self.gpus), ("--gpus of the draft", self.draft_gpus),
            ("--rate", self.rate / 1e12),
        ):  # fmt: skip
            if not 0 < value < math.inf:
                raise UserError(f"{name}: expected more than 0 and finite, got {value:g}")
        if not 0 < self.share <= 1:
            raise UserError(f"--share: expected more than 0 and at most 1, got {self.share:g}")
        if not (0 <= self.wait_s < math.inf and 0 <= self.draft_wait_s < math.inf):
            raise UserError(
                f"waits: expected 0 s or more and finite, got {self.wait_s}, {self.draft_wait_s}"
            )

    def pass_s(self, target_bytes: float, rows: int = 1) -> float:
        """Seconds of a target pass of so many rows that reads so many bytes."""
        wait = self.wait_s + (interpolate(dict(self.row_waits), rows) if self.row_waits else 0.0)
        return target_bytes / (self.gpus * self.rate * self.share) + wait

    def draft_s(self, draft_bytes: float) -> float:
        """Seconds of a draft step that reads so many bytes."""
        return draft_bytes / (self.draft_gpus * self.rate * self.share) + self.draft_wait_s


@dataclass(frozen=True)
class Projection:
    """Bytes, times and predicted speeds; `predictions` holds every draft length up to the block."""

    plain_bytes: float
    draft_bytes: float
    plain_tokens_per_s: float
    verify_bytes: dict[int, float]
    predictions: tuple[Prediction, ...]


def rows_bytes(
    config: K3Config, rows: int, context: int, dtype: torch.dtype, agreement: float
) -> float:
    """Bytes of a pass of `rows`, whose experts agree by `agreement` in [0, 1]."""
    if not 0 <= agreement <= 1:
        raise UserError(f"--agreement: expected 0 to 1, got {agreement}")
    spread = pass_bytes(config, rows, context, dtype)
    one = pass_bytes(config, 1, context, dtype).experts
    return spread.total - agreement * (spread.experts - one)


def project(
    target: K3Config,
    drafter: DraftConfig,
    machine: Machine,
    conditional: Sequence[float],
    *,
    context: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    agreement: float = 0.0,
) -> Projection:
    """Speeds on a machine, for conditional acceptances C_1, C_2, ... (at most the block's).

    Raises UserError for a value out of range.
    """
    if context < 0:
        raise UserError(f"--context: expected 0 tokens or more, got {context}")
    if any(not 0 <= chance <= 1 for chance in conditional):
        raise UserError(
            f"--conditional: expected chances of 0 to 1, got {', '.join(map(str, conditional))}"
        )
    most = min(len(conditional), drafter.block_size)
    draft = weight_bytes(drafter, dtype).total + context_bytes(drafter, context, dtype)
    verify = {n: rows_bytes(target, n, context, dtype, agreement) for n in range(1, most + 2)}
    times = {
        n: machine.pass_s(read, n) + (machine.draft_s(draft) if n > 1 else 0.0)
        for n, read in verify.items()
    }
    return Projection(
        verify[1],
        float(draft),
        1 / times[1],
        verify,
        tuple(predict(conditional, times, seconds=True)),
    )


def fit_wait(machine: Machine, plain_bytes: float, plain_s: float, layers: float) -> Machine:
    """The machine with the wait that makes a plain pass take `plain_s`.

    A draft step waits `layers` times as long, the drafter's layers over the target's.

    Raises UserError for a time below that of the bytes alone.
    """
    bytes_s = replace(machine, wait_s=0.0).pass_s(plain_bytes)
    if not bytes_s <= plain_s < math.inf:
        raise UserError(
            f"--plain-ms {1e3 * plain_s:.2f}: the bytes alone take {1e3 * bytes_s:.2f} ms on this "
            "machine; expected at least that, and finite"
        )
    wait = plain_s - bytes_s
    return replace(machine, wait_s=wait, draft_wait_s=layers * wait)


def table(found: Projection, machine: Machine) -> str:
    """The projection as lines of text."""
    draft_ms = 1e3 * machine.draft_s(found.draft_bytes)
    lines = [
        f"plain: {found.plain_bytes / 1e9:.1f} GB a token, "
        f"{1e3 / found.plain_tokens_per_s:.2f} ms, {found.plain_tokens_per_s:.0f} tokens/s",
        f"draft: {found.draft_bytes / 1e9:.2f} GB, {draft_ms:.2f} ms",
        "",
        "draft length   verify GB   accepted length   tokens/s   speed-up",
    ]
    for row in found.predictions:
        read = found.verify_bytes[row.draft_length + 1] / 1e9
        lines.append(
            f"{row.draft_length:>12}   {read:>9.1f}   {row.accepted_length:>15.2f}   "
            f"{row.tokens_per_s or 0:>8.0f}   {row.speed_up:>7.2f}x"
        )
    given = "bytes and measured layers" if machine.row_waits else "bytes"
    return "\n".join([*lines, "", f"A projection from {given}, not a measurement."])


@module_command
def main(arguments: Sequence[str]) -> None:
    """Kimi K3 with its published MLA drafter on a machine of the options."""
    parser = Parser(prog="python -m dspark_eval.projection", description=main.__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rate", type=float, help="TB/s of one GPU's memory (4.2)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of that rate, what a pass reaches"
    )
    waits = parser.add_mutually_exclusive_group()
    waits.add_argument("--plain-ms", type=float, help="fit the wait of a pass to this plain step")
    waits.add_argument("--layers", type=Path, help="of k3_layers; its rate unless --rate is given")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--agreement", type=float, default=0.0, help="of rows on experts, 0 to 1")
    parser.add_argument("--conditional", type=float, nargs="+", required=True, metavar="C")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    machines = _machines(given)
    found = {
        name: project(
            K3, K3_DRAFTER, machine, given.conditional,
            context=given.context, agreement=given.agreement,
        )
        for name, machine in machines.items()
    }  # fmt: skip
    if given.json:
        said = {name: asdict(projection) for name, projection in found.items()}
        print(json.dumps(said if given.layers else said[""], indent=1))
        return
    for name, projection in found.items():
        print(f"{name}\n\n" if name else "", end="")
        print(table(projection, machines[name]))
        print("\n" if len(found) > 1 and name == next(iter(found)) else "", end="")


def _machines(given: argparse.Namespace) -> dict[str, Machine]:
    """By what is assumed of measured layers; without any, one machine without a name."""
    share = K3_DRAFTER.num_layers / K3.num_hidden_layers
    layers = None if given.layers is None else load_layers(given.layers, K3)
    rate = 4.2e12 if layers is None else layers.rate
    rate = rate if given.rate is None else 1e12 * given.rate
    machine = Machine(given.gpus, rate, given.share, draft_gpus=given.gpus)
    if given.plain_ms is not None:
        plain = rows_bytes(K3, 1, given.context, torch.bfloat16, 0.0)
        return {"": fit_wait(machine, plain, given.plain_ms / 1e3, share)}
    if layers is None:
        return {"": machine}
    found = {}
    for name, parts in (
        ("What a layer takes beside its bytes is shared by the GPUs like them:", given.gpus),
        ("It is the same on every GPU:", 1),
    ):
        waits = {rows: seconds / parts for rows, seconds in layers.wait_s.items()}
        draft_s = share * interpolate(waits, 1)  # its layers read one MLP whatever the rows
        found[name] = replace(machine, row_waits=tuple(sorted(waits.items())), draft_wait_s=draft_s)
    return found


if __name__ == "__main__":
    sys.exit(main())
