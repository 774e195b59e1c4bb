"""The JSON that machines read: one flat dictionary for each run, its keys in one place.

A key is never left out. What a run did not measure is null: `greedy_mismatches` when sampling,
`host_syncs_per_token` on a CPU, everything about plain decoding in `dspark eval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark import ops
from dspark.runtime.sampling import SamplingParams
from dspark_eval.drafting import Drafted
from dspark_eval.environment import describe_environment
from dspark_eval.pair import Pair

SCHEMA_VERSION = 1
RUN_KEYS = (
    "schema_version", "target", "drafter", "batch", "policy", "policy_settings", "verification",
    "temperature", "top_p", "top_k",
    "max_new_tokens", "n_prompts", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup",
    "speedup_ci95", "accepted_length", "accepted_length_ci95", "acceptance_rate",
    "acceptance_rate_with_bonus", "conditional_acceptance", "sibling_rate", "draft_length_mean",
    "rows_per_round", "levels", "bands", "relaxed", "break_even", "draft_ms", "verify_ms",
    "other_ms", "frame_ms_p50", "frame_ms_p99", "host_syncs_per_token", "greedy_mismatches",
    "backends", "environment",
)  # fmt: skip


def run_document(
    pair: Pair,
    drafted: Drafted,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    summary: Mapping[str, Any],
    greedy_mismatches: int | None,
    relaxed: Mapping[str, Any] | None,
    batch: int = 1,
) -> dict[str, Any]:
    """All of `RUN_KEYS`, in their order.

    `summary` comes from `speed.summarize`, `relaxed` from `outcomes.relaxation`.
    """
    values = {
        "schema_version": SCHEMA_VERSION,
        "target": pair.target.name,
        "drafter": pair.drafter_name,
        "batch": batch,
        "policy": drafted.policy.name,
        "policy_settings": drafted.settings(pair.drafter.config.block_size),
        "verification": drafted.method,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": max_new_tokens,
        "greedy_mismatches": greedy_mismatches,
        "relaxed": relaxed,
        "backends": ops.ran(),
        "environment": describe_environment(pair.target.device, pair.target.dtype),
        **summary,
    }
    return {key: values[key] for key in RUN_KEYS}
