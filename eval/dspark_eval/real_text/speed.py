"""How fast one prompt at a time is: plain, with the drafter, and what transformers has to offer.

Everything runs in one process on the same model and the same prompts, one after the other, greedy
unless it says otherwise: `plain` and those named after drafters are dspark's loops; `generate` is
transformers' own, `prompt_lookup` its assisted generation with n-grams of the text. (There is no
smaller model of this tokenizer that could assist.) A loop over Python is what is timed, and a small
model leaves the GPU idle for most of it: ratios are of this runtime, and no bound on what a serving
engine gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.prompts import read_prompts
from dspark.draft.checkpoint import load_drafter
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_eval.real_text.answers import prompt_ids
from dspark_eval.real_text.arms import BEST, REFERENCE
from dspark_eval.real_text.prompts import test_files
from dspark_eval.real_text.training import TRAINED

SPEED = "speed.json"
LOOKUP_TOKENS = 7
SAMPLED = ", T = 1"
Way = Callable[[list[int]], list[int]]


def measure_speed(
    loaded: LoadedTarget, out: Path, prompts: Path, *, per_set: int, max_new_tokens: int
) -> dict[str, Any]:
    """Tokens a second of every way over the first prompts of each set; writes OUT/speed.json.

    Of the reference and the best drafter, those that are trained by now.
    """
    target = loaded.target
    if not isinstance(target, HFTarget):
        raise UserError(f"{target.name}: expected a target of transformers to compare with")
    chat = ChatFormat(loaded.tokenizer)
    asked = [
        ids
        for path in test_files(prompts)
        for ids in prompt_ids(read_prompts([path]).rows[:per_set], chat)
    ]
    ways = _ways(loaded, out, max_new_tokens)
    document: dict[str, Any] = {
        "prompts": len(asked),
        "max_new_tokens": max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU",
        "ways": {},
    }
    texts: dict[str, list[list[int]]] = {}
    for name, way in ways.items():
        way(asked[0])  # warm
        texts[name], seconds = _timed(way, asked, target.device)
        tokens = sum(map(len, texts[name]))
        document["ways"][name] = {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "same_text_as_plain": None if SAMPLED in name else _alike(texts[name], texts["plain"]),
        }
        print(f"{name}: {tokens / seconds:.1f} tokens/s", flush=True)
    plain = document["ways"]["plain"]["tokens_per_second"]
    for each in document["ways"].values():
        each["speed_up"] = each["tokens_per_second"] / plain
    atomic_write_json(out / SPEED, document)
    return document


def _ways(loaded: LoadedTarget, out: Path, new: int) -> dict[str, Way]:
    target = loaded.target
    assert isinstance(target, HFTarget)

    def drafted(arm: str, temperature: float) -> Way:
        drafter = load_drafter(out / arm, target, dtype=target.dtype, device=target.device)
        decoder = SpeculativeDecoder(target, drafter.eval())
        sampling = SamplingParams(temperature)
        return lambda ids: decoder.generate(ids, max_new_tokens=new, sampling=sampling).tokens

    model, pad = target.parts.model, target.end_token_ids[0]

    def assisted(options: dict[str, Any]) -> Way:
        @torch.inference_mode()
        def run(ids: list[int]) -> list[int]:
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

    greedy = SamplingParams()
    return {
        "plain": lambda ids: (
            plain_generate(target, ids, max_new_tokens=new, sampling=greedy).tokens
        ),
        **{
            f"{arm}{label}": drafted(arm, temperature)
            for arm in (REFERENCE, BEST)
            if (out / arm / TRAINED).is_file()
            for label, temperature in (("", 0.0), (SAMPLED, 1.0))
        },
        "generate": assisted({}),
        "prompt_lookup": assisted({"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    }


def _timed(
    way: Way, prompts: Sequence[list[int]], device: torch.device
) -> tuple[list[list[int]], float]:
    started = time.perf_counter()
    texts = [way(ids) for ids in prompts]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return texts, time.perf_counter() - started


def _alike(texts: Sequence[list[int]], plain: Sequence[list[int]]) -> int:
    """How many texts are those of plain decoding, token for token."""
    return sum(own == other for own, other in zip(texts, plain, strict=True))
