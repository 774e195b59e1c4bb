"""Documents of every kind that a report shows, small and by hand, every name in them hostile."""

from __future__ import annotations

from typing import Any

EVIL = (
    """</span><script>window.owned=1;document.title="owned"</script><img src=x onerror=owned=1>"""
)

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00", "device": "cpu", "device_name": "Test CPU", "threads": 1,
    "dtype": "float32", "torch": "2.13.0", "dspark": "0.1.0", "git_revision": "abc123",
}  # fmt: skip


def _round(accepted: int, emitted: int, end: str) -> dict[str, Any]:
    return {
        "drafted": 3, "verified": 3, "accepted": accepted, "emitted": emitted, "end": end,
        "draft_ms": 1.0, "verify_ms": 4.0, "other_ms": 0.5,
    }  # fmt: skip


SAMPLE = {
    "prompt": 0, "why": "median", "question": EVIL, "accepted_length": 2.5, "tokens": 8,
    "finish": "end",
    "text": ["One", " and", EVIL, "\n", "two", "``", " end", ""],
    "kind": ["first", "accepted", "accepted", "corrected", "accepted", "sibling", "bonus",
             "accepted"],
    "confidence": [None, 0.91, 0.5, None, 0.7, None, None, 0.2],
    "round": [-1, 0, 0, 0, 1, 1, 1, 2],
    "rounds": [_round(2, 3, "corrected"), _round(1, 3, "sibling"), _round(1, 1, "all_accepted")],
    "prefill_ms": 3.0,
}  # fmt: skip

LENGTHS = [
    {"low": 0.0, "high": 0.1, "rounds": 2, "verified": [0, 0, 1, 1], "accepted": [0, 0, 1, 1]},
    {"low": 1.0, "high": None, "rounds": 2, "verified": [0, 1, 1, 0], "accepted": [2, 0, 0, 0]},
]

RUN: dict[str, Any] = {
    "schema_version": 1, "target": "nano", "drafter": EVIL, "batch": 1, "policy": "fixed",
    "verification": "token", "temperature": 0.0, "max_new_tokens": 16, "n_prompts": 2,
    "plain_tokens_per_s": 50.0, "speculative_tokens_per_s": 100.0, "speedup": 2.0,
    "speedup_ci95": [1.8, 2.2], "accepted_length": 2.5, "accepted_length_ci95": [2.0, 3.0],
    "acceptance_rate": 0.5, "conditional_acceptance": [0.9, 0.6, None], "draft_ms": 1.0,
    "verify_ms": 4.0, "other_ms": 0.5, "greedy_mismatches": 0, "environment": ENVIRONMENT,
}  # fmt: skip

BENCH = {
    **RUN,
    "extra": {
        "prompts": EVIL, "prompts_sha256": "a", "draft_length": 3, "seed": 5, "peer": None,
        "warnings": [f"beware of {EVIL}"], "plain_tokens_per_s_ci95": [45.0, 55.0],
        "speculative_tokens_per_s_ci95": [90.0, 110.0], "plain_ms_per_token": 20.0,
        "mismatches": None, "lengths_by_entropy": LENGTHS, "samples": [SAMPLE],
    },
}  # fmt: skip

GOODPUT = [
    {"concurrency": n, "plain": 50.0 * n, "speculative": 90.0 * n, "speedup": 1.8,
     "draft_length": 3, "measured_times": True}
    for n in (1, 2, 4)
]  # fmt: skip

EVAL = {
    "schema_version": 1, "target": "nano", "drafter": "d|<b>", "temperature": 0.0,
    "draft_length": 3, "policy": "fixed", "seed": 6, "warnings": [],
    "suites": {
        EVIL: {
            **RUN, "speedup": None, "speedup_ci95": None, "n_rounds": 40, "prompts_sha256": "b",
            "accepted_length_without_loops": 2.5, "loop_share": 0.0, "exact_answers": None,
            "context_buckets": [
                {"low": 0, "high": 128, "rounds": 30, "accepted_length": 2.6},
                {"low": 128, "high": None, "rounds": 10, "accepted_length": 2.1},
            ],
            "lengths_by_entropy": LENGTHS, "samples": [SAMPLE], "goodput": GOODPUT,
            "lossless": {"passed": False, "tokens": 77},
            "served": [{"concurrency": 2, "plain": 90.0, "speculative": 150.0},
                       {"concurrency": 4, "plain": None, "speculative": None}],
            "positions": {"conditional_acceptance": [
                {"ci95": [0.8, 1.0]}, {"ci95": [0.5, 0.7]}, {"ci95": None}
            ]},
            "thresholds": [
                {"threshold": t, "accepted_length": 2.5 - t, "acceptance_rate": 0.5 + t / 2,
                 "rounds": 40}
                for t in (0.0, 0.5, 0.9)
            ],
        }
    },
}  # fmt: skip

_BINS = {"rounds": [20, 20], "predicted_sum": [4.0, 16.0], "survived": [5, 15]}
RELIABILITY = {
    "schema_version": 1, "target": "nano", "drafter": EVIL, "dataset": EVIL, "seed": 7, "bins": 2,
    "warnings": [], "environment": ENVIRONMENT,
    "settings": [
        {
            "temperature": 0.0, "rounds": 40, "prompts": 2, "stops": None,
            "average_ece_before": 0.1, "average_ece_after": 0.05, "average_ece_floor": 0.04,
            "ece_before": [0.1, 0.1], "ece_after": [0.05, None], "ece_floor": [0.04, 0.04],
            "auc": [0.8, None], "diagram": [{"before": _BINS, "after": _BINS}] * 2,
        }
    ],
}  # fmt: skip

COSTS = {
    "kind": "dspark cost model", "schema_version": 1, "target": "nano", "drafter": EVIL,
    "context_tokens": 50, "machine": {}, "environment": ENVIRONMENT,
    "batches": [
        {"batch": n, "plain_s": 0.01 * n, "draft_s": {"1": 0.001, "3": 0.002},
         "verify_s": {"1": 0.01 * n, "4": 0.015 * n}, "other_s": 0.001}
        for n in (1, 4)
    ],
}  # fmt: skip

_WAY = {"tokens_per_s": 400.0, "frame_ms_p50": 2.0, "frame_ms_p99": 2.5}
FRAMES = {
    "schema_version": 1, "command": "python -m dspark_eval.frame_speed", "target": "nano",
    "batch": 8, "temperature": 0.0, "chosen": 3, "draft_length": 3, "frames": {},
    "plain_frames": {}, "environment": ENVIRONMENT,
    "suites": {
        "words": {
            "n_prompts": 2, "plain": _WAY, "speculative": {**_WAY, "tokens_per_s": 700.0},
            "speedup": 1.75, "speedup_ci95": None, "accepted_length": 2.5,
            "accepted_length_ci95": None, "conditional_acceptance": [0.9, 0.6],
            "texts_equal": 2,
        }
    },
}  # fmt: skip


def _paired(ratio: float) -> dict[str, Any]:
    return {"ratio": ratio, "ratio_ci95": [ratio - 0.1, ratio + 0.1]}


def _contender(who: str, length: float, speed: float | None) -> dict[str, Any]:
    return {
        "name": who, "accepted_length": {"value": length, "ci95": [length - 0.2, length + 0.2]},
        "acceptance_rate": {"value": 0.5}, "draft_share": {"value": 0.1},
        "conditional_acceptance": [] if speed is None else [0.9, 0.5],
        "ratio": None if who == "first" else _paired(0.8),
        "speedup": None if speed is None else _paired(speed), "greedy_mismatches": 0,
    }  # fmt: skip


COMPARISON = {
    "kind": "comparison", "schema_version": 1, "target": "nano", "reference": "first",
    "temperature": 0.0, "max_new_tokens": 16, "draft_length": None, "verification": "token",
    "seed": 8, "warnings": [f"beware of {EVIL}"], "environment": ENVIRONMENT,
    "contenders": [
        {"name": who, "kind": "dspark", "parameters": None} for who in ("first", EVIL, "plain")
    ],
    "suites": {
        EVIL: {
            "n_prompts": 2, "prompts_sha256": "b",
            "contenders": [
                _contender("first", 3.0, 2.0), _contender(EVIL, 2.5, 1.5),
                _contender("plain", 1.0, None),
            ],
        }
    },
}  # fmt: skip


def _arm(*each: float) -> dict[str, Any]:
    first = each == (3.0, 3.2)
    over = {"ratio": 1.2, "ratio_ci95": [1.1, 1.3], "prompts_sd": 0.02, "seeds_sd": None}
    return {
        "accepted_length": sum(each) / len(each), "accepted_length_per_seed": list(each),
        "conditional_acceptance": [[0.9]], "dspark_over": None if first else over,
        "verdict": None if first else "ahead",
    }  # fmt: skip


ORDERING = {
    "kind": "table1", "schema_version": 2, "target": "nano", "steps": 10, "draft_length": 3,
    "rows_per_step": 8, "sizes": "equal", "rates": [0.001, 0.002], "rate_steps": 4,
    "rate_prompts": 5,
    "rows": {"rows": 40, "supervised_tokens": 2000},
    "arms": [
        {"arm": "dspark", "seeds": [0, 1], "parameters": 1000, "passes": "1", "lr": 0.002,
         "seconds_per_seed": [4.0, 6.0]},
        {"arm": "lookup", "seeds": [], "parameters": None, "passes": "0", "lr": None,
         "seconds_per_seed": []},
    ],
    "results": [
        {"suite": "words", "temperature": 0.0, "n_prompts": 2,
         "arms": {"dspark": _arm(3.0, 3.2), "lookup": _arm(1.5)}}
    ],
    "rate_search": {
        "seed": 1000, "suite": "other words", "temperature": 1.0,
        "arms": {"dspark": {"best": 0.002, "at_the_edge": True, "trials": [
            {"lr": 0.001, "accepted_length": 1.75}, {"lr": 0.002, "accepted_length": 2.25}]}},
    },
}  # fmt: skip

_CELL = {
    "set": "gsm8k", "temperature": 0.0, "prompts": 2, "loops": [False, True], "loop_share": 0.5,
    "accepted_length": 2.5, "ci95": [2.2, 2.8], "without_loops": 2.4, "acceptance_rate": 0.4,
    "emitted": [3, 2], "rounds": [1, 1], "ece": {"before": 0.1, "after": 0.05, "floor": 0.04},
}  # fmt: skip
REAL_TEXT = {
    "answers": [], "speed": None, "against_reference": {},
    "arms": {
        "small": {
            "trained": {
                "parameters": 1000, "seconds": 9.0, "steps": 8, "steps_per_second": 0.9,
                "held_out": {"accepted_length": 2.4},
            },
            "measured": {"cells": [_CELL]},
        }
    },
}  # fmt: skip
