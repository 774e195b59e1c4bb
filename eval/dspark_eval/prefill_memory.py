"""Peak memory of reading a prompt: over its length, over the target's depth, and in one pass.

    python -m dspark_eval.prefill_memory --layers 9 18 36 --tokens 1024 4096 16384

A K3 of the shipped target's widths with random weights and as many layers as asked for reads random
tokens, in chunks and, with `--whole`, in one pass. Counted is what lives beside weights and cache:
activations of one layer, the bank of the Attention Residuals, one chunk of taps.

Every third layer is MLA here, and so is the last; `bank` is one row of the model's width per chunk
row for each started block of Attention Residuals, the only part that a deeper model adds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from dspark.assets import asset
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.runtime.k3_target import K3Target
from dspark.runtime.prefill import prefill
from dspark.runtime.sampling import SamplingParams, request_generator
from dspark.taps import TapSet
from dspark_eval.environment import heading
from dspark_eval.live_bytes import LiveBytes


def deeper(layers: int, base: K3Config) -> K3Config:
    """The same model with another number of layers, every third of them and the last MLA."""
    full = tuple(i for i in range(layers) if i % 3 == 2 or i == layers - 1)
    return replace(base, num_hidden_layers=layers, full_attention_layers=full)


def bank_bytes(config: K3Config, chunk: int) -> int:
    """What Attention Residuals carry through the layers for one chunk, float32."""
    if config.attn_res_block_size is None:
        return 0
    blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
    return blocks * chunk * config.hidden_size * 4


def measure(
    config: K3Config, tokens: int, chunk: int, device: torch.device | None = None
) -> dict[str, Any]:
    """Most bytes that live while a prompt of so many tokens is read, beside weights and cache."""
    device = device or torch.device("cpu")
    torch.manual_seed(0)
    model = K3ForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    target = K3Target(model.to(device), "random", ())
    prompt = torch.randint(config.vocab_size, (tokens,)).tolist()
    last = config.num_hidden_layers - 1
    taps = TapSet(tuple(sorted({last // 3, 2 * last // 3, last})), target.tap_kinds[0])
    with torch.inference_mode(), LiveBytes(device) as bytes_:
        cache = target.new_cache(1, tokens)
        held = bytes_.live
        bytes_.reset_peak()
        prefill(
            target,
            cache,
            prompt,
            SamplingParams(),
            request_generator(0, 0, device),
            taps=taps,
            on_taps=lambda features: None,
            chunk=chunk,
        )
        peak = bytes_.peak - held
    return {
        "layers": config.num_hidden_layers,
        "tokens": tokens,
        "chunk": chunk,
        "peak_bytes": peak,
        "bank_bytes": bank_bytes(config, min(chunk, tokens)),
        "cache_bytes": cache.nbytes,
    }


@module_command
def main(arguments: Sequence[str]) -> None:
    """Print a table and optionally write the rows as JSON."""
    parser = Parser(
        prog="python -m dspark_eval.prefill_memory", description="Peak memory of reading a prompt."
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[9, 18, 36])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--whole", action="store_true", help="also in one pass")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    if min(*given.layers, *given.tokens, given.chunk) < 1:
        raise UserError("prefill_memory: layers, tokens and chunk: expected at least 1")
    base = K3Config.from_dict(read_json(asset("k3-nano") / "config.json"))
    device, rows = find_device(given.device, "--device"), []
    facts = heading("prefill_memory", arguments, None, device, torch.float32)
    typer.echo(f"{'layers':>6} {'tokens':>7} {'chunk':>6} {'peak MB':>9} {'bank MB':>9}")
    for layers in given.layers:
        for tokens in given.tokens:
            for chunk in [given.chunk, *([tokens] if given.whole else [])]:
                row = measure(deeper(layers, base), tokens, chunk, device)
                rows.append(row)
                typer.echo(
                    f"{layers:>6} {tokens:>7} {chunk:>6} {row['peak_bytes'] / 1e6:>9.3f} "
                    f"{row['bank_bytes'] / 1e6:>9.3f}"
                )
    if given.json is not None:
        atomic_write_json(given.json, {**facts, "rows": rows})
        typer.echo(json.dumps({"rows": len(rows), "file": str(given.json)}))


if __name__ == "__main__":
    sys.exit(main())
