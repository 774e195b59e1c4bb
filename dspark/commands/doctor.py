"""`dspark doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import Device, DType, PrintJson, print_json
from dspark.errors import UserError

TARGET_DTYPES = ("float32", "bfloat16", "float16")


@app.command(epilog="Example: `dspark doctor runs/nano --target nano`")
def doctor(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[CKPT]", help="A drafter folder; without it, this machine."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Also hold the drafter against this target (`nano` or a folder): tokenizer, "
            "template, and which slot layout and tap kind is accepted."
        ),
    ] = None,
    device: Device = "cpu",
    dtype: DType = "float32",
    as_json: PrintJson = False,
) -> None:
    """Examine this machine, or a drafter. Exit code 1: something was found.

    Of the machine: versions, devices, kernel backends, shipped files. Of a drafter: its golden
    vector is replayed, untrained and non-finite weights and edited settings are named.
    `--device` and `--dtype` are the target's.
    """
    if checkpoint is not None:
        ok = _examine_drafter(checkpoint, target, device, dtype, as_json)
        raise typer.Exit(0 if ok else 1)
    if target is not None:
        raise UserError("--target: goes with a drafter; give its folder: dspark doctor CKPT")
    from dspark.doctor import examine, render

    report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        render(report)
    raise typer.Exit(0 if report.ok else 1)


def _examine_drafter(
    checkpoint: Path, target: str | None, device: str, dtype: str, as_json: bool
) -> bool:
    import torch

    from dspark.devices import find_device
    from dspark.doctor_checkpoint import examine_checkpoint, render_checkpoint
    from dspark.runtime.loading import load_target

    if dtype not in TARGET_DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join(TARGET_DTYPES)}; got {dtype!r}")
    where = find_device(device, "--device")
    loaded = None
    if target is not None:
        loaded = load_target(target, dtype=getattr(torch, dtype), device=where)
    report = examine_checkpoint(checkpoint, loaded)
    if as_json:
        print_json(report.to_dict())
    else:
        render_checkpoint(report)
    return report.ok
