"""`python -m dspark_eval.frame_speed --draft D`: recorded speculative frames against plain ones.

    speed-up = tokens per second of speculative frames / tokens per second of plain frames

of the same target, prompts, seeds and process, both recorded as graphs; who goes first changes from
prompt to prompt. The target is k3-nano, or with ``--twin`` a widened twin of it
(`dspark_eval.twins`). With more than one seat the draft length is the one that is fastest on other
prompts, plain decoding among them: what a throughput policy would choose.

Beside the speed-up, per set of prompts: accepted length, distinct experts of a layer that a frame
reads, frame times, and joules per token; and per size of frame launches, idle share and waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark import ops
from dspark.distill.chat import ChatFormat
from dspark.draft.checkpoint import load_drafter
from dspark.draft.model import DSparkDrafter
from dspark.files import atomic_write_json
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_frame import FrameResult
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.device_profile import profile
from dspark_eval.energy import EnergyMeter
from dspark_eval.environment import describe_environment
from dspark_eval.suites import load_suites
from dspark_eval.twins import load_twin

PROFILED = 20


@dataclass(frozen=True)
class Subject:
    """A pair of target and drafter, its static pass, and how it is asked."""

    target: K3Target
    drafter: DSparkDrafter
    static: StaticDecoder
    sampling: SamplingParams
    batch: int
    max_length: int

    def decoder(self, length: int | None) -> GraphDecoder:
        """Plain frames for None, else speculative ones of that draft length."""
        return GraphDecoder(
            self.target,
            None if length is None else self.drafter,
            seats=self.batch,
            max_length=self.max_length,
            draft_length=length,
            sampling=self.sampling,
            static=self.static,
        )


@dataclass
class Run:
    """What one way of decoding did on a set of prompts."""

    texts: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    frame_s: list[float] = field(default_factory=list)
    joules: float | None = None

    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        frames = np.array(self.frame_s) * 1e3
        return {
            "tokens_per_s": self.rate(),
            "tokens": sum(self.tokens),
            "frame_ms_p50": float(np.percentile(frames, 50)),
            "frame_ms_p99": float(np.percentile(frames, 99)),
            "joules_per_token": None if self.joules is None else self.joules / sum(self.tokens),
        }


def decode(
    decoder: GraphDecoder, prompts: Sequence[Sequence[int]], new: int, first: int, run: Run
) -> None:
    """One batch of prompts into ``run``; its time is that of its frames, prompts left out."""
    asked = [Request(p, new, index=first + i) for i, p in enumerate(prompts)]
    decoder.frame_s.clear()
    meter = EnergyMeter()
    before = meter.joules()
    found = decoder.generate_many(asked)
    after = meter.joules()
    run.texts += found
    # with one seat the wall clock from the first token on; with more, prompts come in between
    alone = len(prompts) == 1
    run.seconds.append(found[0].decode_s if alone else sum(decoder.frame_s))
    run.tokens.append(sum(len(g.tokens) - 1 for g in found))
    run.frame_s += decoder.frame_s
    if before is not None and after is not None:
        run.joules = (run.joules or 0.0) + after - before


def compare(
    plain: GraphDecoder,
    fast: GraphDecoder,
    prompts: list[list[int]],
    new: int,
) -> dict[str, Any]:
    """Both ways on the same prompts, in batches of as many as there are seats."""
    runs = Run(), Run()
    size = plain.seats.batch
    for turn, start in enumerate(range(0, len(prompts), size)):
        pairs = list(zip((plain, fast), runs, strict=True))
        for decoder, run in pairs if turn % 2 == 0 else reversed(pairs):
            decode(decoder, prompts[start : start + size], new, start, run)
    slow, quick = runs
    by_prompt = [g.rounds for g in quick.texts]
    rounds = metrics.pool(by_prompt)
    both = np.stack([quick.tokens, quick.seconds, slow.tokens, slow.seconds], axis=1)
    greedy = fast.sampling.greedy
    return {
        "n_prompts": len(prompts),
        "plain": slow.document(),
        "speculative": quick.document(),
        "speedup": quick.rate() / slow.rate(),
        "speedup_ci95": metrics.bootstrap_ci95(both, _ratio),
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.accepted_length_ci95(by_prompt),
        "conditional_acceptance": metrics.conditional_acceptance(rounds),
        "texts_equal": sum(
            a.tokens == b.tokens for a, b in zip(slow.texts, quick.texts, strict=True)
        )
        if greedy
        else None,
    }


def _ratio(sums: np.ndarray) -> np.ndarray:
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def distinct_experts(
    subject: Subject, length: int | None, prompts: list[list[int]], new: int
) -> float | None:
    """Mean number of experts of a layer that a frame reads."""
    decoder = subject.decoder(length)
    counts: list[Tensor] = []

    def count(result: FrameResult) -> None:
        if result.chosen:
            chosen = torch.stack(result.chosen).flatten(1).long()
            seen = torch.zeros(len(chosen), subject.target.model.config.num_experts)
            seen = seen.to(chosen.device).scatter_(1, chosen, 1.0)
            counts.append(seen.sum(1).mean())

    decoder.on_frame = count
    decoder.generate_many([Request(p, new, index=i) for i, p in enumerate(prompts)])
    return float(torch.stack(counts).mean()) if counts else None


def of_frames(decoder: GraphDecoder) -> dict[str, Any] | None:
    """Launches, busy and idle time of frames back to back."""
    if not decoder.replay.recorded:
        return None

    def run() -> None:
        for _ in range(PROFILED):
            decoder.replay.run()

    seen = profile(run, PROFILED)
    print(seen.table(24), flush=True)
    return seen.document()


def best_length(
    subject: Subject, lengths: Sequence[int], prompts: list[list[int]], new: int
) -> tuple[int | None, dict[str, float]]:
    """The fastest draft length on these prompts; None: plain decoding is."""
    rates: dict[int | None, float] = {}
    for length in (None, *lengths):
        run, decoder = Run(), subject.decoder(length)
        for start in range(0, len(prompts), subject.batch):
            decode(decoder, prompts[start : start + subject.batch], new, start, run)
        rates[length] = run.rate()
    best = max(rates, key=lambda length: rates[length])
    return best, {"plain" if k is None else str(k): v for k, v in rates.items()}


def open_subject(options: argparse.Namespace) -> tuple[Subject, ChatFormat, dict[str, Any]]:
    """The pair that was asked for, on the device, and what its bytes are."""
    device = torch.device(options.device)
    loaded = load_target("nano")
    assert isinstance(loaded.target, K3Target)
    drafter = load_drafter(options.draft, loaded.target).eval()
    facts: dict[str, Any] = {"target": "k3-nano"}
    if options.twin:
        twin = load_twin(options.twin, drafter, device=device)
        target, drafter = twin.target, twin.drafter
        facts = {
            "target": target.name,
            "target_bytes": twin.target_bytes,
            "draft_bytes": twin.draft_bytes,
        }
    else:
        dtype = getattr(torch, options.dtype)
        moved = load_target("nano", dtype=dtype, device=device).target
        assert isinstance(moved, K3Target)
        target, drafter = moved, drafter.to(device, dtype)
    sampling = SamplingParams(temperature=options.temperature)
    static = StaticDecoder(target.model)
    room = options.max_length
    chat = ChatFormat(loaded.tokenizer)
    return Subject(target, drafter, static, sampling, options.batch, room), chat, facts


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as a document."""
    subject, chat, facts = open_subject(options)
    ops.forget()
    lengths = options.draft_length or [subject.drafter.config.block_size]
    tuning = load_suites("nano-validation", n_prompts=max(4, subject.batch), seed=1)[0]
    warm = [chat.prompt_ids(row.prompt) for row in tuning.rows]
    length, rates = best_length(subject, lengths, warm, options.new)
    chosen = length if length is not None else max(lengths)
    plain, fast = subject.decoder(None), subject.decoder(chosen)
    found: dict[str, Any] = {
        "command": "python -m dspark_eval.frame_speed " + " ".join(options.arguments),
        **facts,
        "batch": subject.batch,
        "temperature": options.temperature,
        "tuning_tokens_per_s": rates,
        "chosen": "plain" if length is None else length,
        "draft_length": chosen,
        "suites": {},
    }
    for name in options.suite:
        for suite in load_suites(name, n_prompts=options.n_prompts, seed=options.seed):
            prompts = [chat.prompt_ids(row.prompt) for row in suite.rows]
            start = time.perf_counter()
            result = compare(plain, fast, prompts, options.new)
            few = prompts[: 2 * subject.batch]
            result["experts_per_frame"] = {
                "plain": distinct_experts(subject, None, few, options.new),
                "speculative": distinct_experts(subject, chosen, few, options.new),
            }
            result["seconds"] = time.perf_counter() - start
            found["suites"][suite.name] = result
            print(line(suite.name, result), flush=True)
    found["plain_frames"], found["frames"] = of_frames(plain), of_frames(fast)
    found["ops"] = ops.ran()
    found["environment"] = describe_environment(subject.target.device, subject.target.dtype)
    return found


def line(name: str, result: dict[str, Any]) -> str:
    """One set of prompts."""
    low, high = result["speedup_ci95"] or (float("nan"),) * 2
    experts = result["experts_per_frame"]
    plain, fast = result["plain"], result["speculative"]
    text = (
        f"{name}: {result['speedup']:.2f}x [{low:.2f}, {high:.2f}] "
        f"({plain['tokens_per_s']:.0f} -> {fast['tokens_per_s']:.0f} tok/s), accepted length "
        f"{result['accepted_length']:.2f}, frames p50/p99 {fast['frame_ms_p50']:.3f}/"
        f"{fast['frame_ms_p99']:.3f} ms (plain {plain['frame_ms_p50']:.3f})"
    )
    if experts["plain"] is not None:
        text += f", experts {experts['plain']:.1f} -> {experts['speculative']:.1f}"
    if fast["joules_per_token"] is not None:
        text += f", J/token {plain['joules_per_token']:.3f} -> {fast['joules_per_token']:.3f}"
    if result["texts_equal"] is not None:
        text += f", {result['texts_equal']}/{result['n_prompts']} texts equal"
    return text


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m dspark_eval.frame_speed", description=__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a drafter of k3-nano")
    parser.add_argument("--twin", help="name of a widened twin; without: k3-nano itself")
    parser.add_argument("--suite", nargs="+", default=["nano", "nano-validation"])
    parser.add_argument("--n-prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=256, help="most new tokens of a prompt")
    parser.add_argument("--max-length", type=int, default=1024, help="of prompt and answer")
    parser.add_argument("--batch", type=int, default=1, help="seats")
    parser.add_argument("--draft-length", type=int, nargs="*", help="those to choose from")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", help="of k3-nano itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of prompts")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    found = measure(options)
    print(f"{found['target']}, batch {found['batch']}, draft length {found['draft_length']}")
    for name, result in found["suites"].items():
        print(line(name, result))
    if options.json is not None:
        atomic_write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
