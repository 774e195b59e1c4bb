"""What chosen layers of a target read and write on the target's own text.

    block influence of a layer = 1 - mean cos(what it reads, what the next layer reads)

Both are taken in front of the layers' input norms, which is the residual stream, or with Attention
Residuals the mixture that a layer really reads. (Block influence: ShortGPT, Men et al. 2024.)

Rows are run one by one, without padding, until enough tokens were seen.

Letters: n tokens, D hidden, H heads, K head dim, E experts, N taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.distill.chat import TrainingRow
from dspark.k3.model import DecoderLayer
from dspark.runtime.k3_target import K3Target
from dspark.taps import TapSet


@dataclass(eq=False)
class LayerView:
    """Of one layer, float32, one tensor per row.

    reads [n, D]: input of its input norm. mixes [n, H*K]: what its output projection reads, and
    mixed [n, D]: what that writes. mlp_in [n, D]: input of its MLP, normed; mlp_out [n, D]. routed:
    sum over tokens of the router's weights [E], None for a dense layer. inverse_rms: sums over
    tokens of 1 / rms of the sum of experts.
    """

    reads: list[Tensor] = field(default_factory=list)
    mixes: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    mlp_in: list[Tensor] = field(default_factory=list)
    mlp_out: list[Tensor] = field(default_factory=list)
    routed: Tensor | None = None
    inverse_rms: float = 0.0


@dataclass(frozen=True, eq=False)
class View:
    """Of all observed layers, with the taps [n, N*D] of the same rows, and the tokens seen."""

    layers: dict[int, LayerView]
    taps: list[Tensor]
    tokens: int


@torch.no_grad()
def observe(
    target: K3Target,
    rows: Sequence[TrainingRow],
    layers: Sequence[int],
    taps: TapSet,
    tokens: int,
) -> View:
    """Run rows until `tokens` tokens were seen and keep what passes through `layers`."""
    view = View({layer: LayerView() for layer in layers}, [], 0)
    seen = 0
    with ExitStack() as stack:
        for layer, found in view.layers.items():
            stack.enter_context(_watch(target.model.model.decoder_layers[layer], found))
        for ids in _texts(target, rows, tokens):
            cache = target.new_cache(1, ids.shape[1])
            output = target.forward(ids, cache, taps=taps, commit=True)
            assert output.taps is not None
            view.taps.append(output.taps[0].float())
            seen += ids.shape[1]
    return View(view.layers, view.taps, seen)


@torch.no_grad()
def block_influence(target: K3Target, rows: Sequence[TrainingRow], tokens: int) -> list[float]:
    """Of every layer of the target."""
    model = target.model.model
    total = torch.zeros(len(model.decoder_layers), dtype=torch.float64)
    last: list[Tensor] = []
    count = 0

    def reader(index: int) -> Callable[..., None]:
        def read(_module: nn.Module, args: tuple[Any, ...]) -> None:
            now = args[0][0].float()
            if index:
                total[index - 1] += float(F.cosine_similarity(last.pop(), now, -1).sum())
            if index < len(total):
                last.append(now)

        return read

    norms = [layer.input_layernorm for layer in model.decoder_layers] + [model.norm]
    handles = [norm.register_forward_pre_hook(reader(i)) for i, norm in enumerate(norms)]
    try:
        for ids in _texts(target, rows, tokens):
            count += ids.shape[1]
            target.forward(ids, target.new_cache(1, ids.shape[1]), commit=True)
    finally:
        for handle in handles:
            handle.remove()
    return (1 - total / count).tolist()


def _texts(target: K3Target, rows: Sequence[TrainingRow], tokens: int) -> Iterator[Tensor]:
    seen = 0
    for row in rows:
        if seen >= tokens:
            return
        seen += len(row.ids)
        yield torch.tensor([list(row.ids)], device=target.device)


@contextmanager
def _watch(layer: DecoderLayer, found: LayerView) -> Iterator[None]:
    """Hooks that fill `found` as long as the context is open."""

    def taking(places: list[Tensor], of_output: bool) -> Callable[..., None]:
        def take(_module: nn.Module, args: tuple[Any, ...], output: Tensor | None = None) -> None:
            tensor = output if of_output else args[0]
            assert tensor is not None
            places.append(tensor.reshape(-1, tensor.shape[-1]).float())

        return take

    mlp = layer.block_sparse_moe if layer.moe else layer.mlp
    out = layer.self_attn.o_proj
    handles = [
        layer.input_layernorm.register_forward_pre_hook(taking(found.reads, False)),
        out.register_forward_pre_hook(taking(found.mixes, False)),
        out.register_forward_hook(taking(found.mixed, True)),
        layer.post_attention_layernorm.register_forward_hook(taking(found.mlp_in, True)),
        mlp.register_forward_hook(taking(found.mlp_out, True)),
    ]
    if layer.moe:
        handles += _watch_router(layer, found)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_router(layer: DecoderLayer, found: LayerView) -> list[Any]:
    moe = layer.block_sparse_moe
    router = moe.gate
    found.routed = torch.zeros(len(router.weight), device=router.weight.device)

    def routed(_module: nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        weights, chosen = output
        assert found.routed is not None
        found.routed.index_add_(0, chosen.flatten(), weights.flatten().float())

    def normed(_module: nn.Module, args: tuple[Any, ...]) -> None:
        found.inverse_rms += float(args[0].float().square().mean(-1).rsqrt().sum())

    handles = [router.register_forward_hook(routed)]
    if moe.normed:
        handles.append(moe.routed_expert_norm.register_forward_pre_hook(normed))
    return handles
