"""Rotary positions against transformers (frequencies, temperatures) and against complex numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.draft import DraftConfig
from dspark.draft.rotary import Rotary, frequencies, softmax_scale, table_scale
from dspark.draft.shapes import MLAShape, Yarn
from tests.tiny_drafters import FULL, MLA
from tests.tolerance import assert_close

CPU = torch.device("cpu")
INFERACT = Yarn(32.0, 32768, mscale=1.0, mscale_all_dim=1.0)
RADIXARK = Yarn(16.0, 65536)


def transformers_yarn(width: int, theta: float, yarn: Yarn) -> tuple[torch.Tensor, float]:
    rope = {"rope_type": "yarn", "rope_theta": theta}
    rope |= {key: value for key, value in vars(yarn).items() if value is not None}
    config = SimpleNamespace(
        rope_parameters=rope, head_dim=width, max_position_embeddings=1 << 20,
        hidden_size=64, num_attention_heads=1, standardize_rope_params=lambda: None,
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS["yarn"](config, device=CPU)


@given(
    width=st.integers(1, 64).map(lambda half: 2 * half),
    theta=st.sampled_from([10_000.0, 50_000.0, 1_000_000.0]),
    factor=st.floats(1.01, 128.0),
    original=st.sampled_from([16, 320, 4096, 32768, 65536]),
    betas=st.sampled_from([(32.0, 1.0), (8.0, 2.0), (1.5, 0.25)]),
    mscales=st.sampled_from([(None, None), (1.0, 1.0), (0.707, 0.5)]),
    attention_factor=st.sampled_from([None, 0.8]),
)
def test_yarn_equals_transformers(
    width: int, theta: float, factor: float, original: int, betas: tuple[float, float],
    mscales: tuple[float | None, float | None], attention_factor: float | None,
) -> None:  # fmt: skip
    yarn = Yarn(factor, original, *betas, *mscales, attention_factor)
    expected, scale = transformers_yarn(width, theta, yarn)
    assert torch.equal(frequencies(width, theta, yarn), expected)
    assert table_scale(yarn) == pytest.approx(scale, rel=1e-12)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain, scaled = frequencies(64, 50_000.0, None), frequencies(64, 50_000.0, INFERACT)
    assert torch.equal(plain[:8], scaled[:8])
    assert_close(scaled[-4:], plain[-4:] / 32, limit=1e-6)
    assert ((scaled <= plain) & (scaled >= plain / 32.001)).all()


def test_temperatures_of_the_two_published_k3_drafters() -> None:
    """MLA: tables as they are, softmax 0.13086. GQA: tables x 1.2773, softmax as it is."""
    shape = MLAShape(1536, 512, 128, 64, 128)
    mla = replace(MLA, mla=shape, yarn=INFERACT)
    assert table_scale(INFERACT) == 1.0
    assert softmax_scale(mla) == pytest.approx(0.13086, abs=5e-6)
    assert softmax_scale(mla) == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    assert softmax_scale(replace(mla, yarn=None)) == pytest.approx(192**-0.5)
    assert softmax_scale(replace(mla, mla=replace(shape, rope=False))) == pytest.approx(192**-0.5)
    assert table_scale(RADIXARK) == pytest.approx(1.2773, abs=5e-5)
    assert softmax_scale(replace(FULL, yarn=INFERACT)) == pytest.approx(FULL.head_dim**-0.5)


@pytest.mark.parametrize("config", [FULL, MLA], ids=["halves", "interleaved"])
def test_a_turn_is_a_product_of_complex_numbers(config: DraftConfig) -> None:
    rotary = Rotary.of(config, CPU, torch.float64)
    assert rotary is not None
    positions = torch.tensor([0, 1, 17, 4096, 1_000_000])
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    one = frequencies(8, config.rope_theta, config.yarn)
    angle = (positions[:, None].float() * one).double()[:, None]  # the float32 angle, as engines
    if config is MLA:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x[..., :4], x[..., 4:]
    expected = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    parts = (expected.real, expected.imag)
    expected = torch.stack(parts, -1).flatten(-2) if config is MLA else torch.cat(parts, -1)
    assert_close(rotary.at(positions).turn(x), expected, dtype=torch.float32, limit=2e-7)


@pytest.mark.parametrize("config", [FULL, MLA], ids=["halves", "interleaved"])
def test_spans_are_their_positions_whatever_was_asked_before(config: DraftConfig) -> None:
    """Pages turn, texts jump ahead and back, long spans bypass the page."""
    rotary = Rotary.of(config, CPU, torch.float32)
    assert rotary is not None
    spans = [(0, 5), (5, 9), (250, 256), (252, 257), (0, 1), (3, 3), (900, 1300), (1, 200)]
    for start, stop in [*spans, (10**6, 10**6 + 8)]:
        span, expected = rotary.span(start, stop), rotary.at(torch.arange(start, stop))
        assert torch.equal(span.cos, expected.cos)
        assert torch.equal(span.sin, expected.sin)


@pytest.mark.parametrize("config", [FULL, MLA], ids=["halves", "interleaved"])
def test_scores_depend_on_distance_alone(config: DraftConfig) -> None:
    rotary = Rotary.of(config, CPU, torch.float32)
    assert rotary is not None
    q, k = torch.randn(2, 1, 8)
    scores = [
        (rotary.at(torch.tensor([s + 5])).turn(q) * rotary.at(torch.tensor([s])).turn(k)).sum()
        for s in (0, 3, 900)
    ]
    assert_close(torch.stack(scores), scores[0].expand(3), limit=1e-4)


def test_one_temperature_term_alone_is_refused() -> None:
    for mscales in ({"mscale": 1.0}, {"mscale_all_dim": 1.0}):
        with pytest.raises(ValueError, match=r"yarn\.mscale.*both or neither"):
            Yarn(2.0, 16, **mscales)


@pytest.mark.parametrize("betas", [(math.inf, 1.0), (math.nan, 1.0), (32.0, 0.0), (1.0, 1.0)])
def test_blending_needs_two_finite_ends(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"yarn\.beta_fast, yarn\.beta_slow: "):
        Yarn(4.0, 64, *betas)
