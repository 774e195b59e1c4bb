"""`drafter.init: target`: a kda drafter that starts as pruned copies of layers of its target.

    choose layers -> copy them at full size (draft/from_target.py) -> remove heads, channels and MLP
    width that contribute least -> refit what is left -> distil

Contributions are measured on the target's own text: of a head, the mean square of what it adds to
the residual stream; of an MLP channel, its mean square times that of its output column; of a
channel inside the heads, the mean square of what it adds (values) and of its share of q.k (keys).
After a cut the output projection is refitted by ridge regression to what the whole layer wrote.

The drafter's context features are to be what the layers read, RMSNorm(h): `fc` starts as one number
per tap, sum_j a_j tap_j, the least-squares fit to the mean of the chosen layers' normed reads. A
tap that is exactly what a single layer reads gets all the weight. The heads of the drafter, its
slot embeddings and its markov table have no counterpart in the target and start fresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill.chat import TrainingRow
from dspark.distill.contribution import (
    channel_energy,
    head_energy,
    key_energy,
    refit,
    ridge,
)
from dspark.distill.observe import LayerView, View, block_influence, observe
from dspark.draft.config import DraftConfig
from dspark.draft.from_target import (
    DenseMLP,
    check_copyable,
    compose_experts,
    copy_layer,
    dense_mlp,
    uncut_config,
)
from dspark.draft.kda import DraftKDA, KDALayer
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import channel_axis, head_axis, mlp_axis
from dspark.draft.pruning.cutting import best_units
from dspark.draft.pruning.graph import remove_units
from dspark.draft.start import initialise
from dspark.errors import UserError
from dspark.k3.model import DecoderLayer
from dspark.runtime.k3_target import K3Target
from dspark.runtime.target import Target

TOKENS = 4096
"""Text that layers are observed on."""
SPARE = 2
"""Experts are composed to at most so many times the width that will be kept."""


@dataclass(frozen=True)
class Start:
    """What a drafter started from: layers of the target, and the block influence of every layer."""

    layers: tuple[int, ...]
    influence: tuple[float, ...]

    def summary(self) -> str:
        """In one line."""
        each = ", ".join(f"{layer} ({self.influence[layer]:.3f})" for layer in self.layers)
        return f"starting from target layers (block influence): {each}"


def k3_target(target: Target) -> K3Target:
    """The target, if layers can be copied from it. Raises UserError otherwise."""
    if not isinstance(target, K3Target):
        raise UserError(
            f"drafter.init is target: target {target.name} has no KDA layers; use random"
        )
    return target


@torch.no_grad()
def start_from_target(
    fresh: DSparkDrafter,
    target: Target,
    rows: Sequence[TrainingRow],
    layers: tuple[int, ...] | None,
    seed: int,
) -> tuple[DSparkDrafter, Start]:
    """A drafter of `fresh`'s configuration whose layers are pruned copies of the target's.

    Args:
        fresh: Gives the configuration and everything that the target has no counterpart of.
        target: Copied from.
        rows: Text of the target to measure contributions on.
        layers: Ids of KDA layers, as many as the drafter has; None: chosen (`choose_layers`).
        seed: Of fresh MLP channels, where the target has fewer than the drafter.

    Raises:
        UserError: A layer that is no KDA layer or does not exist, the wrong number of them, or a
            drafter larger than they are.
    """
    source = k3_target(target)
    check_copyable(fresh.config, source.model.config)
    influence = block_influence(source, rows, TOKENS)
    chosen = choose_layers(source, influence, fresh.config.num_layers, layers)
    view = observe(source, rows, chosen, fresh.taps, TOKENS)
    originals = [source.model.model.decoder_layers[layer] for layer in chosen]
    views = [view.layers[layer] for layer in chosen]
    width = fresh.config.intermediate_size
    mlps = [
        _dense(original, seen, view.tokens, SPARE * width)
        for original, seen in zip(originals, views, strict=True)
    ]
    config = fresh.config
    widest = max(width, *(mlp.width for mlp in mlps))
    uncut = DSparkDrafter(uncut_config(config, source.model.config, widest))
    initialise(uncut, torch.Generator().manual_seed(seed))
    uncut.to(source.device)
    _share(uncut, fresh)
    _fit_features(uncut, source, view, views)
    for layer, original, mlp in zip(_layers(uncut), originals, mlps, strict=True):
        copy_layer(layer, original, mlp)
    return _cut(uncut, views, config), Start(chosen, tuple(influence))


def choose_layers(
    target: K3Target, influence: Sequence[float], count: int, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Which layers to copy, ascending: those given, or the KDA layers of highest influence.

    Raises UserError for layers that cannot be copied, with those that can.
    """
    config = target.model.config
    known = [i for i in range(config.num_hidden_layers) if not config.is_full_attention(i)]
    if given is None:
        if count > len(known):
            raise UserError(
                f"drafter.num_layers is {count}: with drafter.init target at most {len(known)}, "
                "the target's KDA layers"
            )
        return tuple(sorted(sorted(known, key=lambda i: influence[i])[-count:]))
    bad = [layer for layer in given if layer not in known]
    if bad or list(given) != sorted(set(given)) or len(given) != count:
        raise UserError(
            f"drafter.init_layers is {list(given)}: expected {count} ascending ids of KDA layers, "
            f"of {', '.join(map(str, known))}"
        )
    return given


def _dense(original: DecoderLayer, seen: LayerView, tokens: int, most: int) -> DenseMLP:
    """The layer's MLP as a dense one; the most used experts, while they fit into `most`."""
    if not original.moe:
        return dense_mlp(original.mlp)
    moe = original.block_sparse_moe
    assert seen.routed is not None
    weights = seen.routed / tokens
    wide = moe.experts.w1.shape[1]
    shared = moe.shared_experts.gate_proj.out_features if moe.shared else 0
    count = max(0 if moe.shared else 1, (most - shared) // wide)
    used = weights.argsort(descending=True, stable=True).tolist()[:count]
    return compose_experts(moe, used, weights, seen.inverse_rms / tokens if moe.normed else 1.0)


def _layers(drafter: DSparkDrafter) -> list[KDALayer]:
    return [layer for layer in drafter.layers if isinstance(layer, KDALayer)]


def _share(uncut: DSparkDrafter, fresh: DSparkDrafter) -> None:
    """Everything that has no counterpart in the target, and does not change with size."""
    ours = uncut.state_dict()
    for name, tensor in fresh.state_dict().items():
        if not name.startswith("layers.") or name.endswith("slot_embedding"):
            ours[name].copy_(tensor)


def _fit_features(
    uncut: DSparkDrafter, target: K3Target, view: View, views: Sequence[LayerView]
) -> None:
    """fc and the norms of features and output."""
    width, eps = uncut.config.hidden_size, uncut.config.rms_norm_eps
    reads = torch.stack([torch.cat(seen.reads) for seen in views])  # [L, n, D]
    wanted = F.rms_norm(reads, (width,), None, eps).mean(0)
    # the scale of a token's feature means nothing, it is normed: compare at that of the reads
    size = reads.square().mean(-1).sqrt().mean(0)
    taps = torch.cat(view.taps).unflatten(-1, (-1, width)) / size[:, None, None]  # [n, N, D]
    columns = taps.transpose(1, 2).flatten(0, 1)  # [n*D, N]
    weights = ridge(columns, wanted.flatten()[:, None], 1e-6)[:, 0]
    identity = torch.eye(width, device=taps.device)
    uncut.fc.weight.copy_(torch.cat([weight * identity for weight in weights], 1))
    uncut.hidden_norm.weight.fill_(1.0)
    uncut.norm.weight.copy_(target.model.model.norm.weight)


def _cut(uncut: DSparkDrafter, views: Sequence[LayerView], config: DraftConfig) -> DSparkDrafter:
    """Down to `config`: channels inside heads, heads and MLP width that contribute least."""
    drafter = uncut
    heads, width = config.num_attention_heads, config.intermediate_size
    mixes = [torch.cat(seen.mixes) for seen in views]
    if config.head_dim < drafter.config.head_dim:
        drafter, mixes = _cut_channels(drafter, views, mixes, config.head_dim)
    whole, kept = drafter.config, {}
    hiddens = []
    for index, (layer, seen, mix) in enumerate(zip(_layers(drafter), views, mixes, strict=True)):
        rows = torch.cat(seen.mlp_in)
        parts = (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        mlp = DenseMLP(*(part.weight for part in parts))
        hidden = mlp.hidden(rows, whole.hidden_act)
        kept[f"layers.{index}.heads"] = best_units(head_energy(layer.self_attn, mix), heads)
        kept[f"layers.{index}.mlp"] = best_units(channel_energy(hidden, mlp.down), width)
        hiddens.append(hidden)
    axes = [make(whole, i) for i in range(whole.num_layers) for make in (head_axis, mlp_axis)]
    cut = remove_units(drafter, axes, kept, config)
    for index, (layer, seen) in enumerate(zip(_layers(cut), views, strict=True)):
        chosen = kept[f"layers.{index}.mlp"]
        if seen.routed is not None or len(chosen) < whole.intermediate_size:
            hidden, down = hiddens[index][:, chosen], layer.mlp.down_proj.weight
            refit(down, hidden, torch.cat(seen.mlp_out))
        if heads < uncut.config.num_attention_heads or config.head_dim < uncut.config.head_dim:
            by_head = mixes[index].unflatten(-1, (whole.num_attention_heads, -1))
            mix = by_head[:, kept[f"layers.{index}.heads"]].flatten(1)
            refit(layer.self_attn.o_proj.weight, mix, torch.cat(seen.mixed))
    return cut


def _cut_channels(
    drafter: DSparkDrafter, views: Sequence[LayerView], mixes: list[Tensor], width: int
) -> tuple[DSparkDrafter, list[Tensor]]:
    """Heads of `width` channels: the best are moved to the front of every head, then kept."""
    config = drafter.config
    cut_mixes = []
    for layer, seen, mix in zip(_layers(drafter), views, mixes, strict=True):
        values = _order_channels(layer.self_attn, seen, mix)
        by_head = mix.unflatten(-1, (config.num_attention_heads, -1))
        cut_mixes.append(by_head[..., values[:width]].flatten(1))
    axes = [channel_axis(config, index) for index in range(config.num_layers)]
    kept = {axis.name: range(width) for axis in axes}
    return remove_units(drafter, axes, kept, replace(config, head_dim=width)), cut_mixes


def _order_channels(mixer: DraftKDA, seen: LayerView, mix: Tensor) -> list[int]:
    """Sort the channels of every head by contribution, which changes nothing but their order.

    Keys and queries have an order per head; values one for all heads, since these share a norm.
    Returns the order of the values.
    """
    heads, width = mixer.heads, mixer.head_dim
    columns = mixer.o_proj.weight.square().sum(0).view(heads, width)
    energy = (mix.square().mean(0).view(heads, width) * columns).sum(0)
    values = energy.argsort(descending=True, stable=True)
    keys = key_energy(mixer, seen).argsort(dim=-1, descending=True, stable=True)
    base = torch.arange(heads, device=keys.device)[:, None] * width
    by_key, by_value = (base + keys).flatten(), (base + values).flatten()
    for name in ("q_proj", "k_proj", "f_b_proj", "q_conv1d", "k_conv1d"):
        weight = getattr(mixer, name).weight
        weight.copy_(weight[by_key])
    mixer.dt_bias.copy_(mixer.dt_bias[by_key])
    for name in ("v_proj", "g_proj", "v_conv1d"):
        weight = getattr(mixer, name).weight
        weight.copy_(weight[by_value])
    mixer.o_proj.weight.copy_(mixer.o_proj.weight[:, by_value])
    mixer.o_norm.weight.copy_(mixer.o_norm.weight[values])
    return values.tolist()
