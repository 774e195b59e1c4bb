"""How the weights of a drafter start before it is distilled.

A linear of fan-in n starts normal with standard deviation n^-1/2, so that a block's signal keeps
its size at any width; those that write into the residual stream start at half of it. The usual
fixed 0.02 is n^-1/2 at a width of 2,500: on a narrow drafter it shrinks the signal at every layer,
and AdamW, which moves a weight by at most the learning rate a step, spends its first hundreds of
steps growing it back. The sequential head starts as a random code of the previous token that
nobody reads yet: w1 standard normal, w2 zero, so the first steps learn a bias and not a code.

A KDA layer starts as a memory of every age: within each head the decay of channel i, where nothing
else speaks, is exp(-1/tau_i) with tau from `FASTEST` to `SLOWEST` tokens in even ratios. Its
convolution starts as the row itself with a little of those before, and its slot embeddings at the
size of the normed input that they are added to.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dspark.draft.kda import DraftKDA
from dspark.draft.model import INIT_STD, DSparkDrafter

RESIDUAL_OUTPUTS = ("o_proj", "down_proj")
FASTEST, SLOWEST = 2.0, 2000.0
"""Time constants of the decays of a fresh KDA layer, in tokens."""


@torch.no_grad()
def initialise(
    drafter: DSparkDrafter, generator: torch.Generator, init_scale: str = "fan_in"
) -> None:
    """Set all weights of a fresh drafter on the CPU; norms stay one, biases zero.

    `init_scale` is one of `INIT_SCALES`: by fan-in as above, or `normal`, where every linear and
    the sequential head's table have `INIT_STD`, as in DeepSpec.
    """
    by_fan_in = init_scale == "fan_in"
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5 if by_fan_in else INIT_STD
            scale = 0.5 if by_fan_in and name.endswith(RESIDUAL_OUTPUTS) else 1.0
            module.weight.normal_(0.0, scale * std, generator=generator)
        elif isinstance(module, DraftKDA):
            _initialise_kda(module, generator)
    head = drafter.markov_head
    head.markov_w1.weight.normal_(0.0, 1.0 if by_fan_in else INIT_STD, generator=generator)
    if by_fan_in:
        head.markov_w2.weight.zero_()


def _initialise_kda(layer: DraftKDA, generator: torch.Generator) -> None:
    """Everything of a KDA layer that is no linear and no norm."""
    for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
        taps = conv.weight[:, 0]
        taps.normal_(0.0, 0.3 * taps.shape[1] ** -0.5, generator=generator)
        taps[:, -1] += 1.0
    layer.slot_embedding.normal_(0.0, 1.0, generator=generator)
    spread = torch.linspace(math.log(FASTEST), math.log(SLOWEST), layer.head_dim)
    # bound sigmoid(dt) = -1/tau
    rate = (-spread).exp() / -layer.shape.gate_lower_bound
    layer.dt_bias.copy_(torch.logit(rate).repeat(layer.heads))
    layer.A_log.zero_()
