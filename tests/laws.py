"""Reference laws in float64 numpy, and the chi-square that holds samples against them."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from dspark.runtime.records import Proposal
from dspark.runtime.sampling import SamplingParams


def proposal(tokens: Tensor, probs: Tensor | None) -> Proposal:
    blank = torch.zeros(tokens.shape)
    return Proposal(tokens, probs, blank, blank)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """[V] float64 probabilities: tokens from the most likely down until k or mass p is reached."""
    x = logits.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    if params.top_k:
        p[x < np.sort(x)[::-1][min(params.top_k, len(x)) - 1]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    needed = int((np.cumsum(p[order]) < params.top_p).sum())  # index of the last token needed
    p[p < p[order][min(needed, len(p) - 1)]] = 0
    return p / p.sum()


def pvalue(tokens: Tensor, law: np.ndarray) -> float:
    """Chi-square p-value of tokens against a law; 0 if an impossible token came out."""
    counts = np.bincount(tokens.numpy(), minlength=len(law))
    if counts[law == 0].sum():
        return 0.0
    expected = counts.sum() * law / law.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:  # too thin to stand alone
        seen, wanted = (
            np.append(seen[:-2], seen[-2:].sum()),
            np.append(wanted[:-2], wanted[-2:].sum()),
        )
    if len(seen) < 2:
        return 1.0
    return float(stats.chisquare(seen, wanted).pvalue)
