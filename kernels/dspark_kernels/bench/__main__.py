"""`python -m dspark_kernels.bench [OP ...] [--json FILE]`: every op on this GPU.

One line per size: our time, bytes, what share of the copy rate that is, and the peer's time. A peer
that is not installed is said to be missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from dspark_kernels import bench
from dspark_kernels.bench.harness import Case, Timing, copy_rate, time_case

NOT_OPS = ("__main__", "harness")


def main() -> int:
    known = sorted(m.name for m in iter_modules(bench.__path__) if m.name not in NOT_OPS)
    parser = argparse.ArgumentParser(prog="python -m dspark_kernels.bench", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(known)}; none: all")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    asked = parser.parse_args()
    unknown = [op for op in asked.ops if op not in known]
    if unknown:
        print(f"no benchmark of {unknown[0]}; expected one of {', '.join(known)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU here: these are times of GPU kernels", file=sys.stderr)
        return 2
    rate = copy_rate()
    print(f"{_machine()}; a copy moves {rate / 1e12:.2f} TB/s")
    rows = []
    for op in asked.ops or known:
        print(f"\n{op}\n{'':44}{'us':>9}{'MB':>9}{'of copy':>9}  peer")
        for row in _run(op, rate):
            rows.append(row)
            print(_line(row), flush=True)
            torch.cuda.empty_cache()
    if asked.json is not None:
        found = {"machine": _machine(), "copy_bytes_per_s": rate, "cases": rows}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _machine() -> str:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "missing"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}"


def _run(op: str, rate: float) -> Iterator[dict[str, Any]]:
    cases: Callable[[], Iterator[Case]] = import_module(f"dspark_kernels.bench.{op}").cases
    for case in cases():
        ours = time_case(case.make, case.bytes)
        peer: Timing | str | None = None
        if case.peer is not None:
            try:
                peer = time_case(case.peer, case.bytes)
            except ImportError as missing:
                peer = f"{missing.name} is not installed"
        yield {
            "op": op,
            "case": case.name,
            **asdict(ours),
            "bytes": case.bytes,
            "flops": case.flops,
            "share_of_copy": case.bytes / (ours.median_us * 1e-6) / rate,
            "peer": asdict(peer) if isinstance(peer, Timing) else peer,
            "peer_name": case.peer_name,
        }


def _line(row: dict[str, Any]) -> str:
    peer = row["peer"]
    if isinstance(peer, dict):
        ratio = peer["median_us"] / row["median_us"]
        peer = f"{peer['median_us']:.1f} us, {ratio:.2f}x ours ({row['peer_name']})"
    flops = f", {row['flops'] / row['median_us'] / 1e6:.0f} TFLOP/s" if row["flops"] else ""
    return (
        f"{row['case']:44}{row['median_us']:9.2f}{row['bytes'] / 1e6:9.2f}"
        f"{row['share_of_copy']:9.0%}  {peer or ''}{flops}"
    )


if __name__ == "__main__":
    sys.exit(main())
