"""`python -m dspark_eval.offload_overlap`: idle states leave the GPU while frames run.

    hidden share = (frames alone + copies alone - both) / min(frames alone, copies alone)

1 where the shorter of the two costs nothing beside the longer, 0 where one waits for the other. The
frames are plain ones of a published shape with random weights, queued back to back; the copies are
the states and windows of idle requests of the same model, as a prefix cache moves them
(`Snapshot.states_to_host`). The host's seconds of sending them are told too: it waits for none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.k3.snapshot import Snapshot
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark.seeds import seed_argument
from dspark_eval.busy import say_warnings
from dspark_eval.environment import heading
from dspark_eval.random_k3 import SHAPES, random_model

TIMES = 5


def hidden_share(frames: float, copies: float, both: float) -> float:
    """Of the shorter one, what the longer one hides."""
    return (frames + copies - both) / min(frames, copies)


def idle_requests(target: K3Target, count: int) -> list[Snapshot]:
    """Each with states of its own."""
    cache = target.new_cache(1, 8)
    tokens = torch.arange(4, device=target.device)[None]
    target.forward(tokens, cache, commit=True)
    return [cache.snapshot(0) for _ in range(count)]


def send(idle: Sequence[Snapshot]) -> list[Snapshot]:
    """All of them on their way."""
    return [snapshot.states_to_host() for snapshot in idle]


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Frames, copies, and both, each in turn and the median of `TIMES`."""
    device = find_device(options.device, "--device")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    facts = heading("offload_overlap", options.arguments, options.seed, device, dtype)
    say_warnings(facts)
    model = random_model(SHAPES[options.shape], device, dtype, options.seed)
    target = K3Target(model, options.shape, ())
    decoder = GraphDecoder(target, max_length=options.frames * TIMES * 8 + 64)
    idle = idle_requests(target, options.requests)
    sending: list[float] = []

    def frames() -> None:
        for _ in range(options.frames):
            decoder.replay.run()

    def copies() -> list[Snapshot]:
        begin = time.perf_counter()
        away = send(idle)
        sending.append(time.perf_counter() - begin)
        return away

    def both() -> list[Snapshot]:
        away = copies()
        frames()
        return away

    for work in (frames, copies):
        _seconds(work, on_gpu)
    sending.clear()
    times: dict[str, list[float]] = {"frames": [], "copies": [], "both": []}
    for _ in range(TIMES):
        for name, work in (("frames", frames), ("copies", copies), ("both", both)):
            times[name].append(_seconds(work, on_gpu))
    found = {name: median(seconds) for name, seconds in times.items()}
    moved = sum(snapshot.states_nbytes for snapshot in idle)
    return {
        **facts,
        "shape": options.shape,
        "requests": options.requests,
        "frames": options.frames,
        "bytes": moved,
        "bytes_per_s": moved / found["copies"],
        "seconds": found,
        "sending_s": median(sending),
        "hidden_share": hidden_share(found["frames"], found["copies"], found["both"]),
    }


def _seconds(work: Callable[[], Any], on_gpu: bool) -> float:
    """Until everything is done and has arrived."""
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    kept = work()
    if on_gpu:
        torch.cuda.synchronize()
    del kept
    return time.perf_counter() - begin


def report(found: dict[str, Any]) -> str:
    """One line."""
    ms = {name: 1e3 * seconds for name, seconds in found["seconds"].items()}
    return (
        f"{found['frames']} frames {ms['frames']:.1f} ms, {found['bytes'] / 1e6:.0f} MB of "
        f"{found['requests']} idle requests {ms['copies']:.1f} ms "
        f"({found['bytes_per_s'] / 1e9:.1f} GB/s), both {ms['both']:.1f} ms: "
        f"{100 * found['hidden_share']:.0f} % of the shorter hidden; the host sends for "
        f"{1e3 * found['sending_s']:.1f} ms"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = Parser(prog="python -m dspark_eval.offload_overlap", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-linear-32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=32, help="that are idle")
    parser.add_argument("--frames", type=int, default=40, help="in the meantime")
    parser.add_argument("--seed", type=seed_argument, default=0, help="of the weights")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    if min(options.requests, options.frames) < 1:
        raise UserError("--requests, --frames: expected 1 or more")
    options.arguments = list(arguments)
    return options


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = measure(options)
    print(report(found), flush=True)
    if options.json is not None:
        atomic_write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
