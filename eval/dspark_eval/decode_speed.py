"""`python -m dspark_eval.decode_speed`: batch-1 decoding against the time its bytes must take.

    floor     bytes that a token must read or write / rate of a large copy on the same card
    share     floor / time of a token

A token reads every weight but the embedding, of the routed experts those that it chose, the state
of every KDA layer twice (in and out) and the latents of its context. Three times are taken: frames
replayed back to back, generation as a user gets it (letters read one frame late), and, with
``--peer``, transformers' `generate` on the same weights in the same process. ``--profile`` says
where the time goes and how often the host waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark import ops
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.files import atomic_write_json
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.static.cache import StaticCache
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark.seeds import seed_argument
from dspark_eval.device_profile import profile
from dspark_eval.environment import heading
from dspark_eval.random_k3 import SHAPES, random_model
from dspark_eval.same_weights import peer_kernels, peer_model

COPY_BYTES = 4 << 30


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token, by what they are."""

    shared: int
    experts: int
    state: int
    latents: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.shared + self.experts + self.state + self.latents


def token_bytes(decoder: GraphDecoder, config: K3Config, context: int) -> TokenBytes:
    """Of one row behind ``context`` tokens."""
    static, cache = decoder.decoder, decoder.cache
    if not isinstance(static, StaticDecoder) or not isinstance(cache, StaticCache):
        raise TypeError(f"expected the static pass of a K3 target, got {type(static).__name__}")
    weights = static.weights
    linear = config.num_hidden_layers - len(config.full_attention_layers)
    window = cache.rows[0, 0].numel() * cache.rows.element_size()
    latent = cache.latents.shape[3] * cache.latents.element_size()
    return TokenBytes(
        weights.shared_nbytes,
        config.num_experts_per_token * weights.expert_nbytes,
        2 * linear * (cache.state[0, 0].numel() * 4 + window),
        len(config.full_attention_layers) * context * latent,
    )


def copy_rate(device: torch.device, nbytes: int = COPY_BYTES) -> float:
    """Bytes per second of a large copy, read and written both counted."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = seconds_each(lambda: target.copy_(source), 10, device)
    return 2 * nbytes / seconds


def seconds_each(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Of one call, when they are queued back to back."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


@dataclass(frozen=True)
class Errors:
    """Relative errors of last-row logits against the same weights in float32."""

    static: float
    ordinary: float


def errors(decoder: GraphDecoder, prompt: list[int]) -> Errors:
    """Of the static pass and of the ordinary one, one token behind a prompt.

    Random weights route at random, so rounding that moves a choice of experts shows in full: the
    two are to be compared with each other.
    """
    target = decoder.target
    if not isinstance(target, K3Target):
        raise TypeError(f"expected a K3 target, got {type(target).__name__}")
    model = target.model
    head = torch.tensor([prompt[:-1]], device=target.device)
    last = torch.tensor([prompt[-1:]], device=target.device)
    ordinary = target.new_cache(1, len(prompt))
    model(head, ordinary)
    cache = decoder.decoder.new_cache(1, len(prompt), slots=False)
    cache.load(0, ordinary)
    found = [
        decoder.decoder.logits(decoder.decoder.step(last, cache).last),
        target.logits(model(last, ordinary)[0]),
    ]
    wide = deepcopy(model).float()
    wide.pack_()
    oracle = wide.new_cache(1, len(prompt))
    wide(head, oracle)
    expected = wide.lm_head(wide(last, oracle)[0]).double()
    static, plain = (float((x.double() - expected).norm() / expected.norm()) for x in found)
    return Errors(static, plain)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as a document."""
    device = find_device(options.device, "--device")
    config = SHAPES[options.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(config, device, dtype, options.seed)
    parameters = sum(p.numel() for p in model.parameters())
    target = K3Target(model, options.shape, ())
    length = options.prompt + options.tokens
    ops.forget()  # what a graph is made of is seen as it is recorded, and never again
    decoder = GraphDecoder(target, max_length=length + options.frames + 16)
    recorded = ops.ran()
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(0, config.vocab_size, (options.prompt,), generator=generator).tolist()
    facts = heading("decode_speed", options.arguments, options.seed, device, dtype)
    checked = errors(decoder, prompt) if options.check else None
    floor_bytes = token_bytes(decoder, config, options.prompt + options.tokens // 2)
    rate = copy_rate(device, COPY_BYTES if device.type == "cuda" else 1 << 24)
    floor_s = floor_bytes.total / rate
    frame_s = seconds_each(decoder.replay.run, options.frames, device)
    text = decoder.generate(prompt, max_new_tokens=options.tokens, end_token_ids=[])
    text = decoder.generate(prompt, max_new_tokens=options.tokens, end_token_ids=[])
    generate_s = text.decode_s / (len(text.tokens) - 1)
    found: dict[str, Any] = {
        **facts,
        "n_prompts": 1,
        "shape": options.shape,
        "parameters": parameters,
        "bytes": vars(floor_bytes) | {"total": floor_bytes.total},
        "copy_bytes_per_s": rate,
        "floor_tokens_per_s": 1 / floor_s,
        "frame_us": 1e6 * frame_s,
        "frame_share": floor_s / frame_s,
        "generate": {"tokens": len(text.tokens) - 1, "seconds": text.decode_s},
        "generate_tokens_per_s": 1 / generate_s,
        "generate_share": floor_s / generate_s,
        "logits_errors": None if checked is None else vars(checked),
        "ops": recorded if decoder.replay.recorded else ops.ran(),
    }
    if options.profile and device.type == "cuda":
        seen = profile(lambda: _frames(decoder, options.profiled), options.profiled)
        found["profile"] = seen.document()
        print(seen.table())
    if options.peer:
        found["peer"] = measure_peer(model, prompt, options.peer_tokens, text.tokens)
    return found


def _frames(decoder: GraphDecoder, count: int) -> None:
    for _ in range(count):
        decoder.replay.run()


def measure_peer(
    model: K3ForCausalLM, prompt: list[int], tokens: int, ours: list[int]
) -> dict[str, Any]:
    """transformers' greedy `generate` on the same weights, after one call to warm up."""
    peer = peer_model(model)
    ids = torch.tensor([prompt], device=next(model.parameters()).device)

    def generate(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        told = out[0, len(prompt) :].tolist()
        return time.perf_counter() - start, told

    generate(4)
    short, _ = generate(2)
    long, told = generate(tokens)
    same = next((i for i, (a, b) in enumerate(zip(told, ours, strict=False)) if a != b), tokens)
    return {
        "name": "transformers generate, the same weights",
        "kernels": peer_kernels(),
        "tokens_per_s": (tokens - 2) / (long - short),
        "first_tokens_equal": same,
    }


def report(found: dict[str, Any]) -> str:
    """A short table."""
    b = found["bytes"]
    lines = [
        f"{found['shape']}: {found['parameters'] / 1e9:.2f} B parameters, "
        f"{b['total'] / 1e9:.3f} GB a token (shared {b['shared'] / 1e9:.3f}, experts "
        f"{b['experts'] / 1e9:.3f}, states {b['state'] / 1e9:.3f}, latents "
        f"{b['latents'] / 1e9:.4f}); copy {found['copy_bytes_per_s'] / 1e12:.3f} TB/s",
        f"floor                 {found['floor_tokens_per_s']:8.1f} tok/s",
        f"frames back to back   {1e6 / found['frame_us']:8.1f} tok/s  "
        f"{100 * found['frame_share']:5.1f} % of the floor  {found['frame_us']:.1f} us",
        f"generate              {found['generate_tokens_per_s']:8.1f} tok/s  "
        f"{100 * found['generate_share']:5.1f} %  of {found['generate']['tokens']} tokens",
    ]
    if "peer" in found:
        peer = found["peer"]
        lines.append(
            f"{peer['name']} {peer['tokens_per_s']:8.2f} tok/s (KDA: {peer['kernels']}; first "
            f"{peer['first_tokens_equal']} tokens equal)"
        )
    if found["logits_errors"] is not None:
        wrong = found["logits_errors"]
        lines.append(
            f"logits against float32: static pass {wrong['static']:.2e}, ordinary pass "
            f"{wrong['ordinary']:.2e}"
        )
    lines += [f"warning: {text}" for text in found["warnings"]]
    lines.append("ops: " + ", ".join(f"{name} {what}" for name, what in found["ops"].items()))
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = Parser(prog="python -m dspark_eval.decode_speed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-linear-32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    parser.add_argument("--frames", type=int, default=200, help="frames timed back to back")
    parser.add_argument("--profiled", type=int, default=20, help="frames that are profiled")
    parser.add_argument("--check", action="store_true", help="logits against float32 weights")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--peer", action="store_true", help="transformers beside it")
    parser.add_argument("--peer-tokens", type=int, default=48)
    parser.add_argument("--seed", type=seed_argument, default=0)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    return options


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = measure(options)
    print(report(found), flush=True)
    if options.json is not None:
        atomic_write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
