"""`python -m dspark_eval.frame_policies --draft D`: who picks the next recorded frame.

    plain        one-token frames of a cache that folds every row
    fixed L      frames of one size, the fastest on other prompts
    throughput   the size that the step times and earlier drafts promise most for
    auto         the same, a plain step among the sizes

All but the first replay the graphs of one decoder, which times each size on other prompts first.
Ways take turns on the prompts; a prompt is read once and seated for all of them. At temperature 0
every text that differs from plain decoding is named with the gap between the two best logits there:
in bfloat16 passes of one and of nine rows round differently. Plain frames and those of the best
fixed size then decode the same prompts over and over, for joules per token (`dspark_eval.energy`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark import ops
from dspark.console import Parser, module_command
from dspark.files import atomic_write_json
from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_prompts import PromptReader
from dspark.runtime.graph_sizes import SMALL, ByRate, SizeRule
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.sampling import SamplingParams
from dspark.seeds import seed_argument
from dspark_eval import metrics
from dspark_eval.environment import heading
from dspark_eval.frame_document import few_warnings, lines, speedup
from dspark_eval.frame_runs import (
    Always,
    Run,
    Subject,
    decode,
    divergences,
    energy,
    experts_per_frame,
    of_frames,
)
from dspark_eval.frame_speed import EXPERT_PROMPTS, open_subject
from dspark_eval.policies.sets import MIX, prompt_sets
from dspark_eval.suites import load_suites

PLAIN = "plain"
WAYS = ("fixed", "throughput", "auto")
PAUSES = (32, 1024)


class Ways:
    """Plain frames, and the sized frames of one decoder under several rules."""

    def __init__(
        self, subject: Subject, reader: PromptReader, sizes: Sequence[int], asked: Sequence[str]
    ) -> None:
        self.asked = asked
        shared: dict[str, Any] = {
            "seats": subject.batch, "max_length": subject.max_length,
            "sampling": subject.sampling, "static": subject.static, "reader": reader,
        }  # fmt: skip
        self.plain = GraphDecoder(subject.target, **shared)
        both = subject.target, subject.drafter
        self.sized = GraphDecoder(*both, policy=Auto(Fixed()), sizes=sizes, **shared)
        self.rules: dict[str, SizeRule] = {}
        self.seconds: dict[int, float] = {}
        self.rates: dict[str, float] = {}

    def tune(self, prompts: list[list[int]], new: int) -> None:
        """Time every size, and let the rules see what drafts are like."""
        seats = self.plain.seats.batch
        run = Run()
        for _ in range(2):  # what a device does first, it does slowly
            run = Run()
            self._all(PLAIN, prompts, new, run)
        self.rates[PLAIN] = run.rate()
        for size in self.sized.sizes:
            self.rules[f"fixed {size}"] = Always(size)
            run = Run()
            self._all(f"fixed {size}", prompts, new, run)
            self.seconds[size] = float(np.median(run.frame_s))
            self.rates[f"fixed {size}"] = run.rate()
        verify = {1 + size: seconds for size, seconds in self.seconds.items()}
        costs = BatchCosts(seats, self.seconds[0], {1: 0.0}, verify, 0.0)
        cost = CostModel((costs,), "frames", "frames", 0)
        sizes = self.sized.sizes
        self.rules["throughput"] = ByRate(cost, sizes[1:], seats, PAUSES)
        self.rules["auto"] = ByRate(cost, sizes, seats, PAUSES)
        for name in ("throughput", "auto"):
            self._all(name, prompts, new, Run())

    def chosen(self) -> list[str]:
        """The ways that are measured: with the best fixed size alone."""
        drafting = [f"fixed {size}" for size in self.sized.sizes if size]
        best = max(drafting, key=lambda name: self.rates[name])
        names = {PLAIN: PLAIN, "fixed": best, "throughput": "throughput", "auto": "auto"}
        return [name for way, name in names.items() if way in (PLAIN, *self.asked)]

    def run(self, name: str, prompts: Sequence[list[int]], new: int, first: int, run: Run) -> None:
        """One batch of prompts."""
        decode(self._decoder(name), prompts, new, first, run)

    def experts(self, name: str, prompts: Sequence[Sequence[int]], new: int) -> float | None:
        """Distinct experts of a layer that a frame reads."""
        return experts_per_frame(self._decoder(name), prompts, new)

    def energy(
        self, name: str, prompts: list[list[int]], new: int, least_s: float
    ) -> dict[str, float] | None:
        """Joules per token."""
        return energy(self._decoder(name), prompts, new, least_s)

    def _decoder(self, name: str) -> GraphDecoder:
        if name == PLAIN:
            return self.plain
        self.sized.rule = self.rules[name]
        return self.sized

    def _all(self, name: str, prompts: list[list[int]], new: int, run: Run) -> None:
        seats = self.plain.seats.batch
        for start in range(0, len(prompts), seats):
            self.run(name, prompts[start : start + seats], new, start, run)


def measure_set(ways: Ways, prompts: list[list[int]], new: int) -> dict[str, Run]:
    """Every way on every prompt, taking turns."""
    names, seats = ways.chosen(), ways.plain.seats.batch
    runs = {name: Run() for name in names}
    for turn, start in enumerate(range(0, len(prompts), seats)):
        for step in range(len(names)):
            name = names[(turn + step) % len(names)]
            ways.run(name, prompts[start : start + seats], new, start, runs[name])
    return runs


def of_set(ways: Ways, prompts: list[list[int]], new: int, energy_s: float) -> dict[str, Any]:
    """JSON-ready: every way on a set of prompts."""
    found = describe(measure_set(ways, prompts, new), ways, prompts)
    few = prompts[: max(EXPERT_PROMPTS, ways.plain.seats.batch)]
    for name, result in found.items():
        result["experts"] = ways.experts(name, few, new)
        result["experts_prompts"] = len(few)
        result["energy"] = None
    for name in ways.chosen()[:2]:
        found[name]["energy"] = ways.energy(name, prompts, new, energy_s)
    return found


def describe(runs: dict[str, Run], ways: Ways, prompts: list[list[int]]) -> dict[str, Any]:
    """JSON-ready, each way beside plain frames."""
    plain, target = runs[PLAIN], ways.plain.target
    beside = plain.document()
    found: dict[str, Any] = {}
    for name, run in runs.items():
        by_prompt = [text.rounds for text in run.texts]
        rounds = metrics.pool(by_prompt)
        entry = run.document()
        ratio, interval = speedup(entry, beside)
        entry |= {
            "n_prompts": len(prompts),
            "speedup": ratio,
            "speedup_ci95": interval,
            "sizes": {str(size): n for size, n in sorted(Counter(run.frame_sizes).items())},
        }
        if name != PLAIN:
            entry["accepted_length"] = metrics.accepted_length(rounds)
            entry["accepted_length_ci95"] = metrics.accepted_length_ci95(by_prompt)
            entry["acceptance_rate"] = metrics.acceptance_rate(rounds)
        if ways.plain.sampling.greedy:
            entry["divergences"] = divergences(target, prompts, plain, run)
        found[name] = entry
    return found


def sets(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Prompt rows by the name of their set."""
    mixed = {suite.name: suite for suite in prompt_sets(options.n_prompts, options.seed)}
    found = {}
    for name in options.suite:
        if name == MIX:
            found[name] = list(mixed[MIX].rows)
            continue
        for suite in load_suites(name, n_prompts=options.n_prompts, seed=options.seed):
            found[suite.name] = list(suite.rows)
    return found


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as a document; what time does not allow is left out."""
    started = time.perf_counter()
    rows = sets(options)
    subject, chat, facts = open_subject(options)
    ops.forget()
    reader = PromptReader(subject.target, subject.drafter, remembers=True)
    found: dict[str, Any] = {
        **heading(
            "frame_policies",
            options.arguments,
            options.seed,
            subject.target.device,
            subject.target.dtype,
        ),
        **facts,
        "max_new_tokens": options.new,
        "n_prompts": {name: len(some) for name, some in rows.items()},
        "load_s": time.perf_counter() - started,
        "runs": [],
        "skipped": [],
    }
    for batch in options.batches:
        for temperature in options.temperatures:
            if time.perf_counter() - started > options.seconds:
                found["skipped"].append({"batch": batch, "temperature": temperature})
                continue
            asked = replace(subject, sampling=SamplingParams(temperature=temperature), batch=batch)
            ways = Ways(asked, reader, options.sizes, options.ways)
            tuning = load_suites("nano-validation", n_prompts=max(4, batch), seed=1)[0]
            ways.tune([chat.prompt_ids(row.prompt) for row in tuning.rows], options.new)
            entry: dict[str, Any] = {
                "batch": batch, "temperature": temperature,
                "frame_seconds": {str(size): s for size, s in ways.seconds.items()},
                "tuning_tokens_per_s": ways.rates, "sets": {},
            }  # fmt: skip
            found["runs"].append(entry)
            for name, some in rows.items():
                prompts = [chat.prompt_ids(row.prompt) for row in some]
                entry["sets"][name] = of_set(ways, prompts, options.new, options.energy_seconds)
                found["warnings"] += [
                    f"T={temperature:g}, {text}" for text in few_warnings(name, len(some), batch)
                ]
                entry["after_s"] = time.perf_counter() - started
                print(lines(facts["target"], batch, temperature, name, entry), flush=True)
                keep(options, found)
            if "frames" not in found:
                found["plain_frames"], found["frames"] = map(of_frames, (ways.plain, ways.sized))
    found["ops"] = ops.ran()
    return found


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what there is so far: whoever stops the run has it."""
    if options.json is not None:
        atomic_write_json(options.json, found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = Parser(prog="python -m dspark_eval.frame_policies", description=__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a drafter of k3-nano")
    parser.add_argument("--twin", help="name of a widened twin; without: k3-nano itself")
    names = ["nano-problems", "nano-instructions", MIX]
    parser.add_argument("--suite", nargs="+", default=names, help=f"{MIX} is half free writing")
    parser.add_argument("--n-prompts", type=int, default=60)
    parser.add_argument("--new", type=int, default=160, help="most new tokens of a prompt")
    parser.add_argument("--max-length", type=int, default=640, help="of prompt and answer")
    parser.add_argument("--batch", dest="batches", type=int, nargs="+", default=[1], help="seats")
    parser.add_argument("--temperature", dest="temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SMALL, help="beside the block's")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="beside plain ones")
    parser.add_argument("--dtype", default="bfloat16", help="of k3-nano itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=seed_argument, default=0, help="of the draw of prompts")
    parser.add_argument("--energy-seconds", type=float, default=3.0, help="of a way; 0: none")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.batch, options.temperature = options.batches[0], options.temperatures[0]
    return options


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = measure(options)
    for text in found["warnings"]:
        print(f"warning: {text}", file=sys.stderr)
    keep(options, found)


if __name__ == "__main__":
    sys.exit(main())
