"""`python -m dspark_eval.k3_layers`: one layer of Kimi K3's real shape, decoding, and its floor.

    time    (step of 12 such layers - step of 4) / 8, replayed graphs of the static pass
    floor   bytes that a layer must move / rate of a large copy on the same card

of a KDA layer and of an MLA layer, mixer, Attention Residuals and experts together: hidden 7168,
96 heads, 896 experts in MXFP4 of which a row reads 16. Weights are random, and all layers of a step
are the same one, which is far larger than any cache. Rows of a block choose their experts on their
own, the most that a block can read: how many distinct ones that was is reported. A step of one row
is plain decoding, its state folded at once; one of several replays the rows accepted before, all
but one of them.

What a layer takes beyond its bytes is what `dspark_eval.projection --layers` makes of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark import ops
from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.k3.config import K3Config
from dspark.k3.static.decode import StaticDecoder
from dspark.k3.static.weights import LayerWeights, tensors
from dspark.runtime.graph_replay import Replay
from dspark.seeds import seed_argument
from dspark_eval.busy import say_warnings
from dspark_eval.decode_speed import COPY_BYTES, copy_rate, seconds_each
from dspark_eval.environment import heading
from dspark_eval.projection import K3
from dspark_eval.random_k3 import random_model

KINDS = ("kda", "mla")
FEW, MANY = 4, 12
"""Layers of the two steps; 12 are a block of Attention Residuals."""
VOCABULARY = 64

TINY = replace(
    K3,
    hidden_size=64,
    num_attention_heads=2,
    intermediate_size=64,
    kda_num_heads=2,
    kda_head_dim=16,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=20,
    num_experts_per_token=4,
    moe_intermediate_size=32,
    routed_expert_hidden_size=32,
)
"""The same on a CPU, to try the command out."""

SHAPES = {"k3": K3, "tiny": TINY}


@dataclass(frozen=True)
class Layer:
    """One layer of a kind; a decoder of it alone, with next to no vocabulary."""

    kind: str
    decoder: StaticDecoder

    @property
    def weights(self) -> LayerWeights:
        return self.decoder.weights.layers[0]

    def repeated(self, count: int) -> StaticDecoder:
        """A decoder of so many times this layer, which are held once."""
        found = copy(self.decoder)
        full = tuple(range(count)) if self.kind == "mla" else ()
        found.config = replace(found.config, num_hidden_layers=count, full_attention_layers=full)
        found.weights = replace(found.weights, layers=(self.weights,) * count)
        return found

    def nbytes(self, rows: int, context: int, distinct: float) -> int:
        """What a step of ``rows`` must move: weights once, state in and out, latents in."""
        mlp = self.weights.mlp
        assert isinstance(mlp, ops.MoE)
        expert = _nbytes(x[0] for x in tensors(mlp.experts))
        shared = _nbytes(tensors(self.weights)) - _nbytes(tensors(mlp.experts))
        cache = self.repeated(1).new_cache(1, 1, rows, slots=rows > 1)
        if self.kind == "kda":
            held = 2 * _nbytes((cache.state, cache.rows, cache.decay, cache.beta))
        else:
            held = context * _nbytes((cache.latents[0, 0, 0],))
        return round(shared + distinct * expert + held)


def _nbytes(held: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in held)


def random_layer(config: K3Config, kind: str, device: torch.device, dtype: torch.dtype) -> Layer:
    """Mixer and small matrices as `random_model` makes them, experts of random MXFP4 codes."""
    small = replace(
        config,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        full_attention_layers=(0,) if kind == "mla" else (),
        first_k_dense_replace=0,
        num_experts=config.num_experts_per_token,
    )
    decoder = StaticDecoder(random_model(small, device, dtype))
    (layer,) = decoder.weights.layers
    assert isinstance(layer.mlp, ops.MoE)
    E, D, inputs = config.num_experts, config.hidden_size, layer.mlp.inputs
    router = torch.randn(E, D, device=device).mul_(D**-0.5).to(dtype)
    moe = replace(
        layer.mlp,
        inputs=torch.cat([router, inputs[small.num_experts :]]),
        bias=torch.zeros(E, device=device),
        experts=_experts(config, device),
    )
    decoder.config = replace(small, num_experts=E)
    decoder.weights = replace(decoder.weights, layers=(replace(layer, mlp=moe),))
    return Layer(kind, decoder)


def _experts(config: K3Config, device: torch.device) -> ops.Experts:
    """Codes of every value, scales of 2^-10 to 2^-7."""
    E, width, inner = config.num_experts, config.expert_width, config.moe_intermediate_size

    def draw(low: int, high: int, outputs: int, inputs: int) -> Tensor:
        return torch.randint(low, high, (E, outputs, inputs), dtype=torch.uint8, device=device)

    into, out = (inner, width), (width, inner)
    w1, w3, w2 = (draw(0, 256, o, i // 2) for o, i in (into, into, out))
    s1, s3, s2 = (draw(117, 121, o, i // 32) for o, i in (into, into, out))
    return ops.Experts(w1, w3, w2, (s1, s3, s2))


class Step:
    """A recorded pass of some rows over so many times a layer, behind a text of random state."""

    def __init__(self, layer: Layer, count: int, rows: int, context: int) -> None:
        self.decoder = layer.repeated(count)
        cache = self.decoder.new_cache(1, context, rows, slots=rows > 1)
        for held in (cache.state, cache.rows, cache.latents):
            held.normal_(std=0.1)
        cache.lengths.fill_(context)
        cache.accepted.fill_(rows - 1)
        self.cache = cache
        self.tokens = torch.arange(rows, device=self.decoder.device)[None] % VOCABULARY
        self.replay = Replay(self._run, self.decoder.device)

    def _run(self) -> list[Tensor]:
        return self.decoder.step(self.tokens, self.cache).chosen

    def distinct(self) -> float:
        """Experts that a layer reads, in the mean."""
        chosen = self.replay.run()
        return sum(len(c.unique()) for c in chosen) / len(chosen)


def measure_rows(layer: Layer, rows: int, context: int, count: int) -> dict[str, float]:
    """Seconds of one layer, the bytes it must move, the experts it reads."""
    device = layer.decoder.device
    few, many = (Step(layer, n, rows, context) for n in (FEW, MANY))
    seconds = [seconds_each(step.replay.run, count, device) for step in (few, many)]
    distinct = many.distinct()
    return {
        "rows": rows,
        "seconds": (seconds[1] - seconds[0]) / (MANY - FEW),
        "bytes": layer.nbytes(rows, context, distinct),
        "experts": distinct,
    }


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every kind of layer at every number of rows, as a document."""
    device = find_device(options.device, "--device")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    facts = heading("k3_layers", options.arguments, options.seed, device, dtype)
    say_warnings(facts)
    ops.forget()
    rate = copy_rate(device, COPY_BYTES if on_gpu else 1 << 24)
    found: dict[str, Any] = {
        **facts,
        "shape": options.shape,
        "context": options.context,
        "copy_bytes_per_s": rate,
        "layers": {},
    }
    for kind in KINDS:
        torch.manual_seed(options.seed)
        layer = random_layer(SHAPES[options.shape], kind, device, dtype)
        found["layers"][kind] = [
            measure_rows(layer, rows, options.context, options.count) for rows in options.rows
        ]
        print(lines(kind, found["layers"][kind], rate), flush=True)
        del layer
    found["ops"] = ops.ran()
    return found


def lines(kind: str, measured: list[dict[str, float]], rate: float) -> str:
    """One kind of layer."""
    told = []
    for row in measured:
        floor = row["bytes"] / rate
        told.append(
            f"{kind} layer, {row['rows']} rows: {1e6 * row['seconds']:.1f} us, floor "
            f"{1e6 * floor:.1f} us ({row['bytes'] / 1e6:.0f} MB, {row['experts']:.1f} experts), "
            f"{100 * floor / row['seconds']:.0f} % of it"
        )
    return "\n".join(told)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = Parser(prog="python -m dspark_eval.k3_layers", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="k3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of a step")
    parser.add_argument("--context", type=int, default=8192, help="tokens read before")
    parser.add_argument("--count", type=int, default=50, help="steps timed back to back")
    parser.add_argument("--seed", type=seed_argument, default=0)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(arguments)
    for name in ("rows", "context", "count"):
        given = getattr(options, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise UserError(f"--{name}: expected 1 or more")
    options.arguments = list(arguments)
    return options


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    found = measure(options)
    if options.json is not None:
        atomic_write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
