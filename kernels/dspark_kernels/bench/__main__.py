"""`python -m dspark_kernels.bench [OP ...] [--json FILE]`: every op on this GPU.

One line per size: our time, bytes, what share of the copy rate that is, and the peer's time. A peer
that is not installed is said to be missing. A peer that tunes its kernels on their first call comes
behind all of ours, with a few of its settings and within a time. An op that fails is named at the
end, with exit code 1; the others are timed, and the file has what was timed whenever the run ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from time import monotonic
from typing import Any

import torch

from dspark_kernels import bench
from dspark_kernels.bench.harness import Case, Timing, copy_rate, time_case
from dspark_kernels.bench.peers import at_most, compile_ahead, spread, try_only

SCHEMA_VERSION = 1
NOT_OPS = ("__main__", "harness", "peers")


def main() -> int:
    known = sorted(m.name for m in iter_modules(bench.__path__) if m.name not in NOT_OPS)
    parser = argparse.ArgumentParser(prog="python -m dspark_kernels.bench", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(known)}; none: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--peer-seconds", type=float, default=300.0,
                        help="to compile what tunes itself, and to time it (300)")  # fmt: skip
    parser.add_argument("--peer-settings", type=int, default=4,
                        help="that it tries of each kernel, evenly spread (4; 0: all)")  # fmt: skip
    parser.add_argument("--peer-processes", type=int, default=8,
                        help="that compile them ahead (8)")  # fmt: skip
    asked = parser.parse_args()
    unknown = [op for op in asked.ops if op not in known]
    if unknown:
        print(f"no benchmark of {unknown[0]}; expected one of {', '.join(known)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU here: these are times of GPU kernels", file=sys.stderr)
        return 2
    rate = copy_rate()
    print(f"{_machine()}; a copy moves {rate / 1e12:.2f} TB/s", flush=True)
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join(["python -m dspark_kernels.bench", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "copy_bytes_per_s": rate,
        "cases": [],
        "failed": {},
    }
    for op in asked.ops or known:
        print(f"\n{op}\n{'':44}{'us':>9}{'MB':>9}{'of copy':>9}  peer", flush=True)
        try:
            _run(op, rate, asked, found["cases"])
        except Exception as error:
            traceback.print_exc()
            found["failed"][op] = f"{type(error).__name__}: {error}"
        if asked.json is not None:
            _write(asked.json, found)
    for op, why in found["failed"].items():
        print(f"{op} failed: {why.splitlines()[0]}", file=sys.stderr)
    return 1 if found["failed"] else 0


def _write(file: Path, found: dict[str, Any]) -> None:
    """In one step: a reader, or a run that is killed, never leaves half a file."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(file)


def _machine() -> str:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "missing"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}"


def _run(op: str, rate: float, asked: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Time an op's cases; each is in ``found`` as soon as it is timed."""
    module = import_module(f"dspark_kernels.bench.{op}")
    tunes = hasattr(module, "every_kernel")
    cases: list[Case] = [case for case in module.cases() if asked.only in case.name]
    if tunes:
        compile_ahead(op, asked.only, asked.peer_settings, asked.peer_processes, asked.peer_seconds)
    rows = []
    for case in cases:
        ours = time_case(case.make, case.bytes)
        row = {
            "op": op,
            "case": case.name,
            **asdict(ours),
            "bytes": case.bytes,
            "flops": case.flops,
            "share_of_copy": case.bytes / (ours.median_us * 1e-6) / rate,
            "peer": None if tunes or case.peer is None else _peer_time(case),
            "peer_name": case.peer_name,
        }
        rows.append(row)
        found.append(row)
        print(_line(row), flush=True)
        torch.cuda.empty_cache()
    if tunes:
        _tuned_peers(cases, rows, asked)


def _tuned_peers(cases: list[Case], rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """Times of a peer that tunes its kernels, while there is time."""
    end = monotonic() + asked.peer_seconds
    try_only(spread(asked.peer_settings))
    for case, row in zip(cases, rows, strict=True):
        if case.peer is None:
            continue
        try:
            with at_most(end - monotonic()):
                row["peer"] = _peer_time(case)
        except TimeoutError:
            row["peer"] = f"{case.peer_name}: not within {asked.peer_seconds:g} seconds"
        print(f"{case.name:44}{row['median_us']:9.2f}  beside {_peer(row)}", flush=True)
        torch.cuda.empty_cache()


def _peer_time(case: Case) -> dict[str, float] | str:
    assert case.peer is not None
    try:
        timing: Timing = time_case(case.peer, case.bytes)
    except ImportError as missing:
        return f"{missing.name} is not installed"
    return asdict(timing)


def _peer(row: dict[str, Any]) -> str:
    peer = row["peer"]
    if not isinstance(peer, dict):
        return peer or ""
    ratio = peer["median_us"] / row["median_us"]
    return f"{peer['median_us']:.1f} us, {ratio:.2f}x ours ({row['peer_name']})"


def _line(row: dict[str, Any]) -> str:
    flops = f"{row['flops'] / row['median_us'] / 1e6:.0f} TFLOP/s" if row["flops"] else ""
    more = ", ".join(x for x in (_peer(row), flops) if x)
    return (
        f"{row['case']:44}{row['median_us']:9.2f}{row['bytes'] / 1e6:9.2f}"
        f"{row['share_of_copy']:9.0%}  {more}"
    )


if __name__ == "__main__":
    sys.exit(main())
