"""The thresholds with most modelled tokens per second, fitted on rounds of whole blocks.

One value each, by trying a grid: tokens per second is no smooth function of a threshold, and the
grid is as fine as thresholds matter. Rounds should be of prompts that the drafter did not see.
"""

from __future__ import annotations

from dspark.draft.calibration import Stops
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.confidence import Confidence
from dspark.runtime.policies.entropy import Entropy
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.replay import H_GRID, S_GRID, Blocks, best, replay, sweep
from dspark.runtime.policies.throughput import Delayed, Throughput


def fit_stops(blocks: Blocks, cost: CostModel) -> Stops:
    """Thresholds, best constant length, and which policy the model prefers.

    `tokens_per_s` and `best` compare policies on the rounds that were fitted on; with one value
    fitted for each over thousands of rounds that flatters them by little.
    """
    lengths = range(1, blocks.slots + 1)
    fixed = best(sweep(lambda g: Fixed(int(g)), tuple(map(float, lengths)), blocks, cost))
    entropy = best(sweep(lambda h: Entropy(h_stop=h), H_GRID, blocks, cost))
    rates = {
        "plain": 1 / cost.plain_s(),
        "fixed": fixed.replay.tokens_per_s,
        "entropy": entropy.replay.tokens_per_s,
    }
    s_stop = None
    if blocks.confidence is not None:
        confidence = best(sweep(lambda s: Confidence(s_stop=s), S_GRID, blocks, cost))
        s_stop = confidence.threshold
        rates["confidence"] = confidence.replay.tokens_per_s
        rates["throughput"] = replay(Throughput(cost=cost), blocks, cost).tokens_per_s
        rates["throughput-delayed"] = replay(Delayed(cost), blocks, cost).tokens_per_s
    speculating = {name: rate for name, rate in rates.items() if name != "plain"}
    name = cost.machine.get("device_name")
    return Stops(
        h_stop=entropy.threshold,
        s_stop=s_stop,
        draft_length=int(fixed.threshold),
        best=max(speculating, key=speculating.__getitem__),
        tokens_per_s=rates,
        measured_on=name if isinstance(name, str) else None,
    )
