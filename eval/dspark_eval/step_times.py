"""The cost model of a pair on this machine, from real passes of the runtime's own functions.

    plain        forward over one row per request, committed, and a sampled token
    draft[g]     one proposal of g tokens, g = 1 .. block size
    verify[n]    forward over n rows per request and their logits, n = 1 .. 1 + block, then as many
                 more as two siblings at every position add
    other        verdict, commit, and feeding the taps of what was accepted to the drafter

Lower quartiles: what else a machine does makes a pass longer, never shorter. In every repeat, on
other prompts, all lengths run in turn before the next repeat does, so that a machine that slows
down slows all alike; the first repeat is thrown away. A batch is that many prompts cut to the
length of the shortest; its rounds verify chains, since a tree's rows cost what a chain's do. One
thread on a CPU is timed by the processor time it was given, which equals wall time on an idle
machine and does not count what else runs on a busy one; all else by the wall.

Letters: b batch, g draft length, n rows of a request.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.runtime import prefill
from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.proposal import propose
from dspark.runtime.sampling import SamplingParams, request_generator, sample
from dspark.runtime.verify import verify
from dspark_eval.environment import describe_environment
from dspark_eval.pair import Pair

REPEATS = 12
QUANTILE = 0.25
BATCHES = (1, 2, 4, 8)
PLAIN_STEPS = 4
MACHINE = ("device", "device_name", "cpu_model", "threads", "dtype")
GREEDY = SamplingParams()

Times = dict[tuple[str, int], list[float]]
"""(kind of pass, its count) -> seconds of each."""


def profile_pair(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int] = BATCHES,
    repeats: int = REPEATS,
    advance: Callable[[], None] = lambda: None,
) -> CostModel:
    """Measure every batch size; `advance` is called after each of its `repeats` + 1 repeats."""
    costs, tokens = [], []
    for batch in batches:
        found = []
        for repeat in range(repeats + 1):
            chosen = [prompts[(repeat * batch + row) % len(prompts)] for row in range(batch)]
            found.append(_Passes(pair, chosen).measure())
            tokens.append(min(map(len, chosen)))
            advance()
        costs.append(_summary(batch, found[1:]))  # the first one warms up
    environment = describe_environment(pair.target.device, pair.target.dtype)
    machine = {key: environment[key] for key in MACHINE}
    environment["timed_by"] = timed_by(pair.target.device)
    environment["passes"] = repeats  # behind each point
    return CostModel(
        tuple(costs),
        pair.target.name,
        pair.drafter_name,
        round(sum(tokens) / len(tokens)),
        machine,
        environment,
    )


def timed_by(device: torch.device) -> str:
    """What `seconds` counts here."""
    return "thread" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def seconds(device: torch.device) -> float:
    """A clock for differences, with all work queued on an accelerator finished."""
    return time.thread_time() if timed_by(device) == "thread" else prefill.clock(device)


def _summary(batch: int, repeats: Sequence[Times]) -> BatchCosts:
    times: Times = defaultdict(list)
    for key, values in (item for found in repeats for item in found.items()):
        times[key] += values
    typical = {key: float(np.quantile(values, QUANTILE)) for key, values in times.items()}
    curves = {
        kind: {count: typical[found, count] for found, count in sorted(typical) if found == kind}
        for kind in ("draft", "verify")
    }
    return BatchCosts(
        batch, typical["plain", 1], curves["draft"], curves["verify"], typical["other", 0]
    )


class _Passes:
    """One batch of requests in flight, and the seconds of each kind of pass over it."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]]) -> None:
        self.target, self.drafter = pair.target, pair.drafter
        self.block = pair.drafter.config.block_size
        self.device = pair.target.device
        self.prompts = prompts
        self.head = DraftHead(self.target, self.drafter.draft_ids)
        self.generators = [request_generator(0, row, self.device) for row in range(len(prompts))]
        self.times: Times = defaultdict(list)

    @torch.inference_mode()
    def measure(self) -> Times:
        """(kind, count) -> seconds: rounds of all lengths, wider passes, plain steps."""
        self._prefill()
        for length in range(1, self.block + 1):
            self._round(length)
        for extra in range(2, 2 * self.block + 1, max(1, self.block // 2)):
            rows = 1 + self.block + extra
            self._wide(self.anchor.unsqueeze(1).expand(-1, rows).contiguous())
        for _ in range(PLAIN_STEPS):
            self._plain()
        return self.times

    def _prefill(self) -> None:
        length = min(map(len, self.prompts))
        rows = torch.tensor([list(ids[:length]) for ids in self.prompts], device=self.device)
        most = length + (self.block + 1) * (self.block + 2) + 3 * self.block + PLAIN_STEPS + 1
        self.cache = self.target.new_cache(len(rows), most)
        self.context = self.drafter.new_context(len(rows), most)
        out = self.target.forward(rows, self.cache, taps=self.drafter.taps, commit=True)
        self._feed(out.taps, torch.full_like(rows[:, 0], length))
        self.anchor = self.target.logits(out.hidden[:, -1]).argmax(dim=-1)

    def _round(self, length: int) -> None:
        start = seconds(self.device)
        proposal = propose(
            self.drafter, self.head, self.context, self.anchor, length, GREEDY, self.generators
        )
        drafted = seconds(self.device)
        block = torch.cat((self.anchor.unsqueeze(1), proposal.tokens), dim=1)
        out = self.target.forward(block, self.cache, taps=self.drafter.taps, commit=False)
        logits = self.target.logits(out.hidden)
        passed = seconds(self.device)
        verdict = verify(proposal, logits, GREEDY, self.generators)
        self.cache.commit(verdict.accepted + 1)
        self.anchor = verdict.next_token
        self._feed(out.taps, verdict.accepted + 1)
        end = seconds(self.device)
        self.times["draft", length].append(drafted - start)
        self.times["verify", 1 + length].append(passed - drafted)
        self.times["other", 0].append(end - passed)

    def _feed(self, taps: Tensor | None, counts: Tensor) -> None:
        if taps is not None:
            self.drafter.extend(self.context, taps, counts)

    def _wide(self, rows: Tensor) -> None:
        """A pass that is taken back, of more rows than a block has."""
        start = seconds(self.device)
        out = self.target.forward(rows, self.cache, taps=self.drafter.taps, commit=False)
        self.target.logits(out.hidden)
        self.times["verify", rows.shape[1]].append(seconds(self.device) - start)
        self.cache.rollback()

    def _plain(self) -> None:
        """As plain decoding does it; one row of the same through the verify path for its curve."""
        self._wide(self.anchor.unsqueeze(1))
        start = seconds(self.device)
        out = self.target.forward(self.anchor.unsqueeze(1), self.cache, commit=True)
        logits = self.target.logits(out.hidden[:, -1])
        self.anchor = sample(logits, GREEDY, self.generators)
        self.anchor.tolist()
        self.times["plain", 1].append(seconds(self.device) - start)


def total_repeats(batches: Sequence[int] = BATCHES, repeats: int = REPEATS) -> int:
    """How often `profile_pair` calls `advance`."""
    return len(batches) * (repeats + 1)


def same_machine(model: CostModel, environment: dict[str, Any]) -> bool:
    """Whether a cost model was measured on a machine like this one."""
    return all(environment.get(key) == value for key, value in model.machine.items())
