"""How fast one prompt at a time is: plain, with the drafter, and what transformers has to offer.

Everything runs in one process on the same model and the same prompts (`ways.py` says in which
ways), greedy unless it says otherwise, and is compared with plain decoding of its kind at its own
temperature and with transformers' `generate`. Each prompt goes through all ways before the next
one, beginning with another way each time, so that whatever else the machine does meets all of them;
where slow ways answer the first prompts of each set alone, two ways are compared on the prompts
that both answered. Seconds are of a whole answer, the reading of its prompt included, since
transformers' `generate` does not tell them apart; frames are recorded before. That is all there is
at hand: no smaller model has this tokenizer, and a drafter that reads the target's states is no
model that transformers would take. A loop over Python is what is timed but for recorded frames, and
a small model leaves the GPU idle for most of it: ratios of those are of this runtime, and no bound
on what a serving engine gets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.prompts import read_prompts
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.loading import LoadedTarget
from dspark_eval.environment import heading
from dspark_eval.intervals import paired
from dspark_eval.real_text.answers import prompt_ids
from dspark_eval.real_text.prompts import test_files
from dspark_eval.real_text.reuse import ASKED, is_there
from dspark_eval.real_text.ways import (
    Way,
    find_ways,
    generate_beside,
    is_recorded,
    plain_beside,
    text_beside,
)

SPEED = "speed.json"
WARM_TOKENS = 8
Timed = Sequence[tuple[list[int], float]]
"""Answers and their seconds, prompt by prompt."""


def measure_speed(
    loaded: LoadedTarget,
    out: Path,
    prompts: Path,
    arms: Sequence[str],
    *,
    asked: Mapping[str, Any],
    per_set: int,
    slow_per_set: int | None,
    max_new_tokens: int,
    loops: bool = True,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Tokens a second of every way over the first prompts of each set; writes OUT/speed.json.

    Of the drafters `arms`; `asked` is what decided it, for those that would repeat it. Ways that
    are not recorded answer the first `slow_per_set` of each set, None: all, 0: they are left out;
    not `loops`: drafters are among them no more. `arguments`: of the command, for the file.
    """
    target = loaded.target
    if not isinstance(target, HFTarget):
        raise UserError(f"{target.name}: expected a target of transformers to compare with")
    if slow_per_set is not None and slow_per_set < 0:
        raise UserError(f"--slow-per-set: expected 0 or more; got {slow_per_set}")
    chat = ChatFormat(loaded.tokenizer)
    sets = [prompt_ids(read_prompts([path]).rows[:per_set], chat) for path in test_files(prompts)]
    prompt_lists = in_turn(sets)
    slow = len(in_turn([some[:slow_per_set] for some in sets]))  # prompts, the first ones of all
    longest = max(map(len, prompt_lists)) + max_new_tokens
    found = find_ways(target, out, arms, max_length=longest, slow=slow > 0, loops=loops)
    if not found.named:
        raise UserError(next(iter(found.refused.values())))
    if not any(map(is_recorded, found.named)):
        prompt_lists = prompt_lists[:slow]  # nobody is there to answer the others
    for name, reason in found.refused.items():
        print(f"{name}: left out: {reason}", flush=True)
    runs: dict[str, list[tuple[list[int], float]]] = {name: [] for name in found.named}
    for way in found.named.values():
        way(prompt_lists[0], min(WARM_TOKENS, max_new_tokens))
    document: dict[str, Any] = {
        **heading("real_text", arguments, None, target.device, target.dtype),
        ASKED: dict(asked),
        "asked_prompts": len(prompt_lists),
        "max_new_tokens": max_new_tokens,
        "recorded": found.recorded,
        "refused": found.refused,
    }
    for at, ids in enumerate(prompt_lists):
        due = [name for name in runs if at < slow or is_recorded(name)]
        for name in from_the(at, due):
            runs[name].append(_timed(found.named[name], ids, max_new_tokens, target.device))
        document |= {"prompts": at + 1, "ways": {name: figures(name, runs) for name in runs}}
        atomic_write_json(out / SPEED, document)  # what a run that ends early has measured
        print(f"prompt {at + 1} of {len(prompt_lists)}", flush=True)
    return document


def in_turn(sets: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """The first prompt of each set, then the second of each: one that ends early has seen all."""
    return [ids for row in zip_longest(*sets) for ids in row if ids is not None]


def from_the(turn: int, ways: Sequence[str]) -> list[str]:
    """All of them in their order, beginning with another one each turn."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def is_timed(out: Path, asked: Mapping[str, Any]) -> bool:
    """Whether all prompts were timed before; a run that ended early starts anew.

    Raises UserError if they were with other settings.
    """
    if not is_there(out / SPEED, asked):
        return False
    known = read_json(out / SPEED)
    return bool(known.get("prompts") == known.get("asked_prompts"))


def figures(name: str, runs: Mapping[str, Timed]) -> dict[str, Any]:
    """Of one way: over all prompts that it answered, prompt by prompt, and beside other ways on
    those that both answered; None where the other one is not there."""
    own = runs[name]
    tokens, seconds = sum(len(text) for text, _ in own), sum(spent for _, spent in own)
    same, shared = _same_text(own, runs.get(text_beside(name) or ""))
    return {
        "prompts": len(own),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **_beside("speed_up", own, runs.get(plain_beside(name))),
        **_beside("over_generate", own, runs.get(generate_beside(name))),
        "by_prompt": _pairs(own),
        "same_text_as_plain": same,
        "same_text_prompts": shared,
    }


def _pairs(found: Timed) -> list[tuple[float, float]]:
    return [(float(len(text)), spent) for text, spent in found]


def _beside(key: str, own: Timed, other: Timed | None) -> dict[str, Any]:
    """Tokens a second over the other's; both have the first prompts in common."""
    shared = min(len(own), len(other or ()))
    names = (key, f"{key}_ci95", f"{key}_prompts")
    if not shared:
        return dict(zip(names, (None, None, 0), strict=True))
    found = paired(_pairs(own[:shared]), _pairs((other or ())[:shared]))
    return dict(zip(names, (found.ratio, found.ratio_ci95, shared), strict=True))


def _same_text(own: Timed, other: Timed | None) -> tuple[int | None, int]:
    """How many texts are the other's, and of how many."""
    pairs = list(zip(own, other or (), strict=False))
    if not pairs:
        return None, 0
    return sum(text == beside for (text, _), (beside, _) in pairs), len(pairs)


def _timed(way: Way, ids: list[int], new: int, device: torch.device) -> tuple[list[int], float]:
    started = time.perf_counter()
    text = way(ids, new)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return text, time.perf_counter() - started


def speeds_table(speed: Mapping[str, Any]) -> str:
    """A row for each way, and a line that says so where frames were not recorded."""
    lines = [
        "| way | prompts | tokens/s | against plain of its kind and temperature "
        "| over transformers' generate | same text |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for way, each in speed["ways"].items():
        count, n = each["same_text_as_plain"], each.get("prompts", speed["prompts"])
        same = "-" if count is None else f"{count} of {each.get('same_text_prompts', n)}"
        ratios = " | ".join(_ratio(each, key, n) for key in ("speed_up", "over_generate"))
        lines.append(f"| {way} | {n} | {each['tokens_per_second']:.1f} | {ratios} | {same} |")
    if speed.get("recorded") is False:
        lines += ["", "No frame was recorded on this device: those ways ran unrecorded."]
    return "\n".join(lines)


def _ratio(each: Mapping[str, Any], key: str, prompts: int) -> str:
    """With its interval, and of how many prompts where not of all."""
    if each.get(key) is None:
        return "-"
    low, high = each.get(f"{key}_ci95") or (float("nan"), float("nan"))
    n = each.get(f"{key}_prompts", prompts)
    return f"{each[key]:.2f} [{low:.2f}, {high:.2f}]" + f", n = {n}" * (n != prompts)
