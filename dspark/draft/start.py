"""How the weights of a drafter start before it is distilled.

A linear of fan-in n starts normal with standard deviation n^-1/2, so that a block's signal keeps
its size at any width; those that write into the residual stream start at half of it. The usual
fixed 0.02 is n^-1/2 at a width of 2,500: on a narrow drafter it shrinks the signal at every layer,
and AdamW, which moves a weight by at most the learning rate a step, spends its first hundreds of
steps growing it back. The sequential head starts as a random code of the previous token that
nobody reads yet: w1 standard normal, w2 zero, so the first steps learn a bias and not a code.
"""

from __future__ import annotations

import torch
from torch import nn

from dspark.draft.model import DSparkDrafter

RESIDUAL_OUTPUTS = ("o_proj", "down_proj")


@torch.no_grad()
def initialise(drafter: DSparkDrafter, generator: torch.Generator) -> None:
    """Set all weights of a fresh drafter on the CPU; norms stay one, biases zero."""
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            scale = 0.5 if name.endswith(RESIDUAL_OUTPUTS) else 1.0
            module.weight.normal_(0.0, scale * std, generator=generator)
    head = drafter.markov_head
    head.markov_w1.weight.normal_(0.0, 1.0, generator=generator)
    head.markov_w2.weight.zero_()
