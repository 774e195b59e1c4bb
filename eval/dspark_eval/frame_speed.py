"""`python -m dspark_eval.frame_speed --draft D`: recorded speculative frames against plain ones.

    speed-up = tokens per second of speculative frames / tokens per second of plain frames

of the same target, prompts, seeds and process, both recorded as graphs; who goes first changes from
prompt to prompt. The target is k3-nano, or with ``--twin`` a widened twin of it
(`dspark_eval.twins`). With more than one seat the draft length is the one that is fastest on other
prompts, plain decoding among them: what a throughput policy would choose.

Beside the speed-up, per set of prompts: accepted length, distinct experts of a layer that a frame
reads, frame times, and joules per token; and per size of frame launches, idle share and waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark import ops
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.distill.chat import ChatFormat
from dspark.draft.checkpoint import load_drafter
from dspark.files import atomic_write_json
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.loading import load_target
from dspark.runtime.sampling import SamplingParams
from dspark.seeds import seed_argument
from dspark.wording import counted
from dspark_eval.environment import heading
from dspark_eval.frame_document import few_warnings
from dspark_eval.frame_runs import Subject, best_length, compare, distinct_experts, of_frames
from dspark_eval.suites import load_suites
from dspark_eval.twins import load_twin

EXPERT_PROMPTS = 8
"""Prompts of a set whose frames' experts are counted, outside the times: more where seats are."""


def open_subject(options: argparse.Namespace) -> tuple[Subject, ChatFormat, dict[str, Any]]:
    """The pair that was asked for, on the device, and what its bytes are."""
    device = find_device(options.device, "--device")
    loaded = load_target("nano")
    assert isinstance(loaded.target, K3Target)
    drafter = load_drafter(options.draft, loaded.target).eval()
    facts: dict[str, Any] = {"target": "k3-nano"}
    if options.twin:
        twin = load_twin(options.twin, drafter, device=device)
        target, drafter = twin.target, twin.drafter
        facts = {
            "target": target.name,
            "target_bytes": twin.target_bytes,
            "draft_bytes": twin.draft_bytes,
        }
    else:
        dtype = getattr(torch, options.dtype)
        moved = load_target("nano", dtype=dtype, device=device).target
        assert isinstance(moved, K3Target)
        target, drafter = moved, drafter.to(device, dtype)
    sampling = SamplingParams(temperature=options.temperature)
    static = StaticDecoder(target.model)
    room = options.max_length
    chat = ChatFormat(loaded.tokenizer)
    return Subject(target, drafter, static, sampling, options.batch, room), chat, facts


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as a document."""
    subject, chat, facts = open_subject(options)
    ops.forget()
    device = subject.target.device
    lengths = options.draft_length or [subject.drafter.config.block_size]
    tuning = load_suites("nano-validation", n_prompts=max(4, subject.batch), seed=1)[0]
    warm = [chat.prompt_ids(row.prompt) for row in tuning.rows]
    length, rates = best_length(subject, lengths, warm, options.new)
    chosen = length if length is not None else max(lengths)
    plain, fast = subject.decoder(None), subject.decoder(chosen)
    found: dict[str, Any] = {
        **heading("frame_speed", options.arguments, options.seed, device, subject.target.dtype),
        **facts,
        "batch": subject.batch,
        "temperature": options.temperature,
        "tuning_tokens_per_s": rates,
        "chosen": "plain" if length is None else length,
        "draft_length": chosen,
        "suites": {},
    }
    for name in options.suite:
        for suite in load_suites(name, n_prompts=options.n_prompts, seed=options.seed):
            prompts = [chat.prompt_ids(row.prompt) for row in suite.rows]
            start = time.perf_counter()
            result = compare(plain, fast, prompts, options.new, options.energy_seconds)
            few = prompts[: max(EXPERT_PROMPTS, subject.batch)]
            result["experts_per_frame"] = {
                "plain": distinct_experts(subject, None, few, options.new),
                "speculative": distinct_experts(subject, chosen, few, options.new),
                "n_prompts": len(few),
            }
            result["seconds"] = time.perf_counter() - start
            found["suites"][suite.name] = result
            found["warnings"] += few_warnings(suite.name, len(prompts), subject.batch)
            print(line(suite.name, result), flush=True)
    found["plain_frames"], found["frames"] = of_frames(plain), of_frames(fast)
    found["ops"] = ops.ran()
    return found


def line(name: str, result: dict[str, Any]) -> str:
    """One set of prompts."""
    low, high = result["speedup_ci95"] or (float("nan"),) * 2
    experts = result["experts_per_frame"]
    plain, fast = result["plain"], result["speculative"]
    text = (
        f"{name} (n = {result['n_prompts']}): {result['speedup']:.2f}x [{low:.2f}, {high:.2f}] "
        f"({plain['tokens_per_s']:.0f} -> {fast['tokens_per_s']:.0f} tok/s), accepted length "
        f"{result['accepted_length']:.2f}, frames p50/p99 {fast['frame_ms_p50']:.3f}/"
        f"{fast['frame_ms_p99']:.3f} ms (plain {plain['frame_ms_p50']:.3f})"
    )
    if experts["plain"] is not None:
        text += f", experts {experts['plain']:.1f} -> {experts['speculative']:.1f}"
        text += f" (of {counted(experts['n_prompts'], 'prompt')})"
    if plain["energy"] is not None and fast["energy"] is not None:
        joules = [way["energy"]["joules_per_token"] for way in (plain, fast)]
        text += f", J/token {joules[0]:.3f} -> {joules[1]:.3f}"
    if result["texts_equal"] is not None:
        text += f", {result['texts_equal']}/{result['n_prompts']} texts equal"
    return text


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = Parser(prog="python -m dspark_eval.frame_speed", description=__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a drafter of k3-nano")
    parser.add_argument("--twin", help="name of a widened twin; without: k3-nano itself")
    parser.add_argument("--suite", nargs="+", default=["nano", "nano-validation"])
    parser.add_argument("--n-prompts", type=int, default=60)
    parser.add_argument("--new", type=int, default=256, help="most new tokens of a prompt")
    parser.add_argument("--max-length", type=int, default=1024, help="of prompt and answer")
    parser.add_argument("--batch", type=int, default=1, help="seats")
    parser.add_argument("--draft-length", type=int, nargs="*", help="those to choose from")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", help="of k3-nano itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=seed_argument, default=0, help="of the draw of prompts")
    parser.add_argument("--energy-seconds", type=float, default=3.0, help="of each way; 0: none")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    return options


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = measure(options)
    print(f"{found['target']}, batch {found['batch']}, draft length {found['draft_length']}")
    for name, result in found["suites"].items():
        print(line(name, result))
    for text in found["warnings"]:
        print(f"warning: {text}", file=sys.stderr)
    if options.json is not None:
        atomic_write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
