"""How fast one prompt at a time is: plain, with the drafter, and what transformers has to offer.

Everything runs in one process on the same model and the same prompts, greedy unless it says
otherwise, and is compared with plain decoding at its own temperature; each prompt goes through all
ways before the next one, beginning with another way each time, so that whatever else the machine
does meets all of them. Seconds are of a whole answer, the reading of its prompt included, since
transformers' `generate` does not tell them apart. `plain` and those named after drafters are
dspark's loops; `generate` is transformers' own, `prompt_lookup` its assisted generation with
n-grams of the text, `early_exit` that by the first half of the model's own layers. That is all
there is at hand: no smaller model has this tokenizer, and a drafter that reads the target's states
is no model that transformers would take. A loop over Python is what is timed, and a small model
leaves the GPU idle for most of it: ratios are of this runtime, and no bound on what a serving
engine gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.prompts import read_prompts
from dspark.draft.checkpoint import load_drafter
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_eval.environment import describe_environment
from dspark_eval.intervals import paired
from dspark_eval.real_text.answers import prompt_ids
from dspark_eval.real_text.prompts import test_files
from dspark_eval.real_text.reuse import ASKED, is_there

SPEED = "speed.json"
LOOKUP_TOKENS = 7
SAMPLED = ", T = 1"
WARM_TOKENS = 8
Way = Callable[[list[int], int], list[int]]
"""An answer to a prompt, of so many tokens at most."""


def measure_speed(
    loaded: LoadedTarget,
    out: Path,
    prompts: Path,
    arms: Sequence[str],
    *,
    asked: Mapping[str, Any],
    per_set: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Tokens a second of every way over the first prompts of each set; writes OUT/speed.json.

    Of the drafters `arms`; `asked` is what decided it, for those that would repeat it.
    """
    target = loaded.target
    if not isinstance(target, HFTarget):
        raise UserError(f"{target.name}: expected a target of transformers to compare with")
    chat = ChatFormat(loaded.tokenizer)
    prompt_lists = in_turn(
        [prompt_ids(read_prompts([path]).rows[:per_set], chat) for path in test_files(prompts)]
    )
    ways = _ways(loaded, out, arms)
    runs: dict[str, list[tuple[list[int], float]]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompt_lists[0], min(WARM_TOKENS, max_new_tokens))
    document: dict[str, Any] = {
        ASKED: dict(asked),
        "asked_prompts": len(prompt_lists),
        "max_new_tokens": max_new_tokens,
        "environment": describe_environment(target.device, target.dtype),
    }
    for at, ids in enumerate(prompt_lists):
        for name in from_the(at, list(ways)):
            runs[name].append(_timed(ways[name], ids, max_new_tokens, target.device))
        figures = {
            name: _figures(name, found, runs[plain_beside(name)]) for name, found in runs.items()
        }
        document |= {"prompts": at + 1, "ways": figures}
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


def plain_beside(way: str) -> str:
    """What a way's speed-up is over: plain decoding at its own temperature."""
    return f"plain{SAMPLED}" if way.endswith(SAMPLED) else "plain"


def is_timed(out: Path, asked: Mapping[str, Any]) -> bool:
    """Whether all prompts were timed before; a run that ended early starts anew.

    Raises UserError if they were with other settings.
    """
    if not is_there(out / SPEED, asked):
        return False
    known = read_json(out / SPEED)
    return bool(known.get("prompts") == known.get("asked_prompts"))


def _figures(
    name: str, found: list[tuple[list[int], float]], plain: list[tuple[list[int], float]]
) -> dict[str, Any]:
    """Of one way: over all prompts, and prompt by prompt."""
    tokens, seconds = sum(len(text) for text, _ in found), sum(spent for _, spent in found)
    own = [(float(len(text)), spent) for text, spent in found]
    other = [(float(len(text)), spent) for text, spent in plain]
    against = paired(own, other)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speed_up": against.ratio,
        "speed_up_ci95": against.ratio_ci95,
        "by_prompt": own,
        "same_text_as_plain": None
        if name.endswith(SAMPLED)
        else sum(text == beside for (text, _), (beside, _) in zip(found, plain, strict=True)),
    }


def _ways(loaded: LoadedTarget, out: Path, arms: Sequence[str]) -> dict[str, Way]:
    """All of them; plain decoding and the last of the drafters at temperature 1 too."""
    target = loaded.target
    assert isinstance(target, HFTarget)

    def plain(temperature: float) -> Way:
        sampling = SamplingParams(temperature)
        return lambda ids, new: (
            plain_generate(target, ids, max_new_tokens=new, sampling=sampling).tokens
        )

    def drafted(arm: str, temperature: float) -> Way:
        drafter = load_drafter(out / arm, target, dtype=target.dtype, device=target.device)
        decoder = SpeculativeDecoder(target, drafter.eval())
        sampling = SamplingParams(temperature)
        return lambda ids, new: decoder.generate(ids, max_new_tokens=new, sampling=sampling).tokens

    model, pad = target.parts.model, target.end_token_ids[0]

    def assisted(options: dict[str, Any]) -> Way:
        @torch.inference_mode()
        def run(ids: list[int], new: int) -> list[int]:
            tokens = torch.tensor([ids], device=target.device)
            out = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=pad,
                **options,
            )
            return [int(token) for token in out[0, len(ids) :].tolist()]

        return run

    return {
        "plain": plain(0.0),
        **{arm: drafted(arm, 0.0) for arm in arms},
        f"plain{SAMPLED}": plain(1.0),
        **{f"{arm}{SAMPLED}": drafted(arm, 1.0) for arm in arms[-1:]},
        "generate": assisted({}),
        "prompt_lookup": assisted({"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
        "early_exit": assisted({"assistant_early_exit": max(1, target.num_layers // 2)}),
    }


def _timed(way: Way, ids: list[int], new: int, device: torch.device) -> tuple[list[int], float]:
    started = time.perf_counter()
    text = way(ids, new)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return text, time.perf_counter() - started


def speeds_table(speed: Mapping[str, Any]) -> str:
    """A row for each way."""
    lines = [
        "| way | tokens/s | against plain at its temperature | same text |",
        "|---|--:|--:|--:|",
    ]
    for way, each in speed["ways"].items():
        low, high = each.get("speed_up_ci95") or (float("nan"), float("nan"))
        count = each["same_text_as_plain"]
        same = "-" if count is None else f"{count} of {speed['prompts']}"
        lines.append(
            f"| {way} | {each['tokens_per_second']:.1f} | "
            f"{each['speed_up']:.2f} [{low:.2f}, {high:.2f}] | {same} |"
        )
    return "\n".join(lines)
