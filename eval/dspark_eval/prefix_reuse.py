"""What a prefix cache saves where prompts begin alike, and that it changes no token.

    python -m dspark_eval.prefix_reuse --shared 512 --prompts 12 [--draft DIR] [--budget-mb 64]

Every prompt is a shipped problem behind the same beginning of `--shared` tokens (other problems,
one after another). Each is decoded twice, without and with the cache; reported are the seconds to
the first token of both, what the cache counted, and whether the tokens were equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.assets import asset
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.distill.prompts import read_prompts
from dspark.draft.checkpoint import load_drafter
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark_eval.busy import say_warnings
from dspark_eval.environment import heading


def shared_prompts(loaded: LoadedTarget, shared: int, count: int) -> list[list[int]]:
    """`count` problems behind one beginning of `shared` tokens."""
    rows = read_prompts([asset("prompts/test.jsonl")], strict=True).rows
    texts = [
        loaded.tokenizer.apply_chat_template(
            row.prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]
    beginning = list(islice((token for ids in texts[count:] for token in ids), shared))
    if len(beginning) < shared or len(texts) < count:
        raise UserError(f"--shared {shared}, --prompts {count}: more than the shipped prompts have")
    return [beginning + ids for ids in texts[:count]]


def measure(
    loaded: LoadedTarget,
    draft: Path | None,
    prompts: list[list[int]],
    *,
    budget_bytes: int,
    host_bytes: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decode every prompt without and with one prefix cache."""
    target, sampling = loaded.target, SamplingParams()
    drafter = None if draft is None else load_drafter(draft, target).eval()
    decode: Callable[..., Generation] = partial(plain_generate, target)
    if drafter is not None:
        decode = SpeculativeDecoder(target, drafter).generate
    held = PrefixCache(target, drafter, budget_bytes, host_bytes=host_bytes)
    ask = partial(decode, max_new_tokens=max_new_tokens, sampling=sampling)
    ask(prompts[0])  # the first pass of a process is slow for reasons of its own
    without = [ask(prompt) for prompt in prompts]
    with_cache = [ask(prompt, prefix_cache=held) for prompt in prompts]
    stats = held.stats()
    return {
        "target": target.name,
        "drafter": None if draft is None else str(draft),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "prefill_s": sum(one.prefill_s for one in without),
        "prefill_cached_s": sum(one.prefill_s for one in with_cache),
        "mismatches": sum(a.tokens != b.tokens for a, b in zip(without, with_cache, strict=True)),
        **asdict(stats),
        "hit_rate": stats.hit_rate,
        "token_hit_rate": stats.token_hit_rate,
    }


@module_command
def main(arguments: Sequence[str]) -> int:
    """Print what was measured; exit code 1 if a token differed."""
    parser = Parser(
        prog="python -m dspark_eval.prefix_reuse", description="What a prefix cache saves."
    )
    parser.add_argument("--target", default="nano")
    parser.add_argument("--draft", type=Path, help="folder of a drafter; without it, plain")
    parser.add_argument("--shared", type=int, default=512, help="tokens all prompts begin with")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--budget-mb", type=float, default=64.0)
    parser.add_argument("--host-mb", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args(arguments)
    if min(given.shared, given.prompts, given.max_new_tokens) < 1 or given.budget_mb <= 0:
        raise UserError("prefix_reuse: every number must be at least 1, --budget-mb above 0")
    loaded = load_target(given.target, device=find_device(given.device, "--device"))
    target = loaded.target
    facts = heading("prefix_reuse", arguments, None, target.device, target.dtype)
    say_warnings(facts)
    found = measure(
        loaded,
        given.draft,
        shared_prompts(loaded, given.shared, given.prompts),
        budget_bytes=int(given.budget_mb * 1e6),
        host_bytes=int(given.host_mb * 1e6),
        max_new_tokens=given.max_new_tokens,
    )
    for name, value in found.items():
        print(f"{name:>18}  {value:.4g}" if isinstance(value, float) else f"{name:>18}  {value}")
    if given.json is not None:
        atomic_write_json(given.json, {**facts, **found})
    return 1 if found["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
