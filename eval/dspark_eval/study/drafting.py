"""What one draft costs at growing context: time on this machine's CPU, and bytes it must read.

A context is filled with random features in pieces, as prefill would, then whole drafts (block and
sequential head, greedy) are timed one after the other, alone on one thread. Random features cost
what real ones do: no operation of a draft depends on values.

    python -m dspark_eval.study.drafting RUN TARGET LENGTH...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.draft.checkpoint import load_drafter
from dspark.draft.context import DraftContext
from dspark.draft.cost import context_bytes, weight_bytes
from dspark.draft.model import DSparkDrafter
from dspark.files import atomic_write_json
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.loading import load_target
from dspark.runtime.proposal import propose
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target

DRAFTING_FILE = "drafting.json"
PIECE = 8192
WARMUP, DRAFTS = 5, 40


@torch.no_grad()
def time_drafts(run: Path, target_name: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds and bytes of a draft after contexts of `lengths` tokens; written to RUN."""
    target = load_target(target_name).target
    drafter = load_drafter(run, target).eval()
    results = []
    for length in sorted(lengths):
        context = drafter.new_context(1, length)
        _fill(drafter, context, length)
        times = _times(drafter, target, context)
        low, middle, high = np.percentile(times, (10, 50, 90))
        results.append(
            {
                "context": length,
                "draft_ms": float(middle),
                "draft_ms_p10": float(low),
                "draft_ms_p90": float(high),
                "weight_bytes": weight_bytes(drafter.config, torch.float32).total,
                "context_bytes": context_bytes(drafter.config, length, torch.float32),
                "held_bytes": context.nbytes,
            }
        )
    atomic_write_json(run / DRAFTING_FILE, results)
    return results


def _fill(drafter: DSparkDrafter, context: DraftContext, length: int) -> None:
    width = drafter.config.hidden_size * len(drafter.config.target_layer_ids)
    generator = torch.Generator().manual_seed(0)
    piece = torch.randn(1, PIECE, width, generator=generator)
    for start in range(0, length, PIECE):
        drafter.extend(context, piece[:, : min(PIECE, length - start)])


def _times(drafter: DSparkDrafter, target: Target, context: DraftContext) -> list[float]:
    anchor = torch.tensor([1], device=target.device)
    generator = torch.Generator().manual_seed(0)
    head, length = DraftHead(target, drafter.draft_ids), drafter.config.block_size
    times = []
    for draft in range(WARMUP + DRAFTS):
        start = time.perf_counter()
        propose(drafter, head, context, anchor, length, SamplingParams(), generator)
        if draft >= WARMUP:
            times.append(1e3 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, name, *counts = sys.argv[1:]
    time_drafts(Path(folder), name, [int(count) for count in counts])
