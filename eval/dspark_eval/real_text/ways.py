"""The ways to answer a prompt that `speed.py` times, by name.

    plain, NAME of a drafter         dspark's loops, pass by pass
    plain, recorded; NAME, recorded  the same as recorded frames (docs/graphs.md)
    generate                         transformers' own
    prompt_lookup, early_exit        its assisted generation: n-grams of the text, the first half of
                                     the model's own layers
    .., T = 1                        the same at temperature 1: plain decoding, `generate`, and the
                                     drafters

Greedy without `T = 1`. A way is compared with plain decoding of its kind at its temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dspark.draft.checkpoint import load_drafter
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.static_pass import StaticPass
from dspark.runtime.target import Target

PLAIN, GENERATE = "plain", "generate"
RECORDED, SAMPLED = ", recorded", ", T = 1"
LOOKUP_TOKENS = 7
Way = Callable[[list[int], int], list[int]]
"""An answer to a prompt, of so many tokens at most."""


def is_recorded(way: str) -> bool:
    """Whether it is one of recorded frames."""
    return way.removesuffix(SAMPLED).endswith(RECORDED)


def plain_beside(way: str) -> str:
    """What a way's speed-up is over: plain decoding of its kind at its own temperature."""
    return PLAIN + RECORDED * is_recorded(way) + SAMPLED * way.endswith(SAMPLED)


def generate_beside(way: str) -> str:
    """transformers' `generate` at the way's temperature."""
    return GENERATE + SAMPLED * way.endswith(SAMPLED)


def text_beside(way: str) -> str | None:
    """Whose greedy text a way's has to be: plain frames are held against plain decoding, all else
    against what its speed-up is over. None: it samples."""
    if way.endswith(SAMPLED):
        return None
    return PLAIN if way == PLAIN + RECORDED else plain_beside(way)


@dataclass
class Ways:
    """What can be timed here.

    refused: why some are not there, by name. recorded: whether frames were recorded, and not merely
    called, as on a CPU; None: there are none.
    """

    named: dict[str, Way]
    refused: dict[str, str] = field(default_factory=dict)
    recorded: bool | None = None


def find_ways(
    target: Target,
    out: Path,
    arms: Sequence[str],
    *,
    max_length: int,
    slow: bool,
    loops: bool = True,
) -> Ways:
    """All of them, with the drafters `arms` of the study OUT; not `slow`: those of frames alone;
    not `loops`: drafters in frames alone.

    target: Of transformers. max_length: of the longest prompt and its answer.
    """

    @cache
    def drafter(arm: str) -> DSparkDrafter:
        found = load_drafter(out / arm, target, dtype=target.dtype, device=target.device)
        return found.eval()

    asked = [(PLAIN, None, 0.0), *((arm, arm, 0.0) for arm in arms), (PLAIN, None, 1.0)]
    asked += [(arm, arm, 1.0) for arm in arms]
    ways = Ways({})
    if slow:
        for name, arm, temperature in asked:
            if arm is not None and not loops:
                continue
            own = None if arm is None else drafter(arm)
            ways.named[_named(name, temperature)] = _by_rounds(target, own, temperature)
        ways.named |= _of_transformers(target)
    static: StaticPass | None = None
    for name, arm, temperature in asked:
        full = _named(name + RECORDED, temperature)
        try:
            decoder = GraphDecoder(
                target,
                None if arm is None else drafter(arm),
                max_length=max_length,
                sampling=SamplingParams(temperature),
                static=static,
            )
        except UserError as problem:
            ways.refused[full] = str(problem)
            continue
        static = decoder.decoder
        ways.recorded = decoder.turns.recorded
        ways.named[full] = _by_frames(decoder)
    return ways


def _named(name: str, temperature: float) -> str:
    return name + SAMPLED * (temperature > 0)


def _by_rounds(target: Target, drafter: DSparkDrafter | None, temperature: float) -> Way:
    sampling = SamplingParams(temperature)
    if drafter is None:
        return lambda ids, new: (
            plain_generate(target, ids, max_new_tokens=new, sampling=sampling).tokens
        )
    decoder = SpeculativeDecoder(target, drafter)
    return lambda ids, new: decoder.generate(ids, max_new_tokens=new, sampling=sampling).tokens


def _by_frames(decoder: GraphDecoder) -> Way:
    return lambda ids, new: decoder.generate(ids, max_new_tokens=new).tokens


def _of_transformers(target: Target) -> dict[str, Way]:
    """What the library itself has to offer for this model."""
    assert isinstance(target, HFTarget)
    model, pad = target.parts.model, target.end_token_ids[0]

    def assisted(options: dict[str, Any]) -> Way:
        @torch.inference_mode()
        def run(ids: list[int], new: int) -> list[int]:
            tokens = torch.tensor([ids], device=target.device)
            out = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                pad_token_id=pad,
                **options,
            )
            return [int(token) for token in out[0, len(ids) :].tolist()]

        return run

    greedy, half = {"do_sample": False}, max(1, target.num_layers // 2)
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {
        GENERATE: assisted(greedy),
        GENERATE + SAMPLED: assisted(whole),
        "prompt_lookup": assisted({**greedy, "prompt_lookup_num_tokens": LOOKUP_TOKENS}),
        "early_exit": assisted({**greedy, "assistant_early_exit": half}),
    }
