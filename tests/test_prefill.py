"""Reading a prompt: in chunks as in one pass, and what it holds at once, every storage counted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.k3 import attn_res, rounds, tiled_attention
from dspark.k3.attn_res import mix
from dspark.k3.config import K3Config
from dspark.k3.layers import RMSNorm, linear
from dspark.runtime import plain
from dspark.runtime.hf_open import hf_target
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.prefill import prefill
from dspark.runtime.sampling import SamplingParams, request_generator
from dspark.taps import TapSet
from dspark_eval import prefill_memory
from dspark_eval.live_bytes import LiveBytes
from dspark_eval.prefill_memory import bank_bytes, deeper, main, measure
from tests.headings import assert_headed
from tests.hf_tiny import tiny_hf
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

CPU = torch.device("cpu")
CONFIGS = pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])


@cache
def target(config: K3Config) -> K3Target:
    return K3Target(tiny_model(config), "tiny", (2,))


def taps_of(config: K3Config) -> TapSet:
    return TapSet((0, 3, 6), target(config).tap_kinds[0])


def read(config: K3Config, tokens: Tensor, chunk: int) -> tuple[dict[str, Tensor], list[int]]:
    """Everything that reading leaves behind, and the rows of each tap hand-over."""
    made, handed = target(config).new_cache(1, tokens.shape[1]), []
    generator = request_generator(0, 0, CPU)
    with torch.inference_mode():
        anchor = prefill(
            target(config),
            made,
            tokens[0].tolist(),
            SamplingParams(temperature=1.0),
            generator,
            taps=taps_of(config),
            on_taps=lambda features: handed.append(features),
            chunk=chunk,
        )
    left = {"anchor": anchor, "taps": torch.cat(handed, dim=1)}
    for i, layer in enumerate(made.layers):
        for name in ("state", "window", "latents"):
            if hasattr(layer, name):
                left[f"{i} {name}"] = getattr(layer, name)
    return left, [features.shape[1] for features in handed]


# --- the result ----------------------------------------------------------------------------------


@CONFIGS
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunks_leave_what_one_pass_leaves(config: K3Config, chunk: int):
    """Taps are handed over chunk by chunk; states, latents and the sampled token are the same."""
    tokens = tiny_tokens(1, 100, config)
    whole, _ = read(config, tokens, 1000)
    left, handed = read(config, tokens, chunk)
    assert handed == [min(chunk, 100 - start) for start in range(0, 100, chunk)]
    assert torch.equal(left.pop("anchor"), whole.pop("anchor"))
    for name, expected in whole.items():
        assert_close(left[name], expected, limit=1e-5, what=name)


@CONFIGS
def test_bit_for_bit_where_chunks_begin_alike(config: K3Config):
    """A prompt read in chunks, and the passes of these chunks made by hand."""
    tokens = tiny_tokens(1, 90, config)
    left, _ = read(config, tokens, 32)
    made = target(config).new_cache(1, 90)
    with torch.inference_mode():
        pieces = [
            target(config).forward(rows, made, taps=taps_of(config), commit=True).taps
            for rows in tokens.split(32, dim=1)
        ]
    assert torch.equal(left["taps"], torch.cat(pieces, dim=1))
    for i, layer in enumerate(made.layers):
        for name in ("state", "window", "latents"):
            if hasattr(layer, name):
                assert torch.equal(left[f"{i} {name}"], getattr(layer, name))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short text has many of them, in attention and in reads of the bank."""
    for module in (tiled_attention, rounds):
        monkeypatch.setattr(module, "TILE_ROWS", 3)
        monkeypatch.setattr(module, "TILE_SLOTS", 5)
    monkeypatch.setattr(attn_res, "READ_ROWS", 9)


@CONFIGS
@pytest.mark.usefixtures("small_tiles")
def test_tiles_compute_what_the_whole_sequence_computes(config: K3Config):
    """Against the model without a cache, which has neither tiles nor latent queries; a ragged batch
    with padding on either side, whose rows then go on with a second chunk."""
    model, tokens = target(config).model, tiny_tokens(3, 34, config)
    with torch.enable_grad():
        expected, _ = model(tokens)
    real = torch.tensor([20, 13, 17])
    place = torch.arange(20)
    for left in (False, True):
        held = model.new_cache(3, 40)
        valid = place >= 20 - real[:, None] if left else place < real[:, None]
        rows = torch.zeros(3, 20, dtype=torch.int64)
        for row, count in enumerate(real.tolist()):
            rows[row, valid[row]] = tokens[row, :count]
        with torch.no_grad():
            first, _ = model(rows, held, valid=valid)
            following = torch.stack([tokens[b, n : n + 14] for b, n in enumerate(real.tolist())])
            second, _ = model(following, held)
        for row, count in enumerate(real.tolist()):
            assert_close(first[row, valid[row]], expected[row, :count], limit=1e-5)
            assert_close(second[row], expected[row, count : count + 14], limit=1e-5)


@pytest.mark.parametrize("before", [0, 1, 700])
def test_tiled_attention_against_float64(before: int):
    """Ragged rows over several tiles; scores of up to 60, where an unshifted exp would overflow."""
    generator = torch.Generator().manual_seed(before)
    rows, rank = 300, 24
    lengths = torch.tensor([before, before // 2])
    q = torch.randn(2, 3, rows, 32, generator=generator) * 3
    latents = torch.randn(2, before + rows, 32, generator=generator)
    for row in range(2):  # slots behind a row's own are another's: they must not matter
        latents[row, int(lengths[row]) + rows :] = 1e4
    out = tiled_attention.attend(q, latents, rank, lengths)
    own = lengths[:, None] + torch.arange(rows)
    hidden = torch.arange(before + rows) > own[..., None]
    scores = torch.matmul(q.double(), latents.double().transpose(1, 2).unsqueeze(1))
    weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    assert_close(out, torch.matmul(weights, latents.double()[:, None, :, :rank]), limit=1e-5)


def test_a_read_in_parts_is_a_read(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    norm, query = RMSNorm(16, 1e-5), linear(16, 1)
    bank, prefix = [torch.randn(2, 50, 16) for _ in range(3)], torch.randn(2, 50, 16)
    with torch.no_grad():
        whole = mix(prefix, bank, norm, query)
        monkeypatch.setattr(attn_res, "READ_ROWS", 40)
        assert_close(mix(prefix, bank, norm, query), whole, limit=1e-6)


# --- what it holds -------------------------------------------------------------------------------


def test_the_counter_counts_to_the_byte():
    with torch.inference_mode(), LiveBytes(CPU) as bytes_:
        first = torch.zeros(100)
        view, second = first.view(10, 10), first.double()
        assert (bytes_.live, bytes_.peak) == (1200, 1200)
        del first
        assert bytes_.live == 1200, "a view keeps its storage"
        del view
        second.add_(1.0)
        assert (bytes_.live, bytes_.peak) == (800, 1200)
        bytes_.reset_peak()
        second = second[:10].clone()
        assert (bytes_.live, bytes_.peak) == (80, 880)


def peak(config: K3Config, layers: int, tokens: int, chunk: int = 128) -> int:
    return int(measure(deeper(layers, config), tokens, chunk)["peak_bytes"])


@CONFIGS
def test_peak_does_not_grow_with_the_prompt(config: K3Config):
    """To the byte: taps, hidden states and attention of 2,048 tokens need what those of 1,280 do,
    both beyond one tile of slots."""
    assert peak(config, 6, 2048) == peak(config, 6, 1280)


def test_peak_does_not_grow_with_depth():
    """To the byte, where nothing is carried from layer to layer but the residual stream."""
    assert peak(PLAIN, 24, 640) == peak(PLAIN, 6, 640)


def test_attention_residuals_add_one_row_for_each_block_and_nothing_else():
    """Every layer reads all finished block sums, so a chunk carries them: to the byte."""
    shallow, deep = deeper(6, TINY), deeper(24, TINY)
    carried = bank_bytes(deep, 128) - bank_bytes(shallow, 128)
    assert carried == 6 * 128 * TINY.hidden_size * 4
    assert peak(TINY, 24, 640) - peak(TINY, 6, 640) == carried


def test_one_pass_over_everything_does_grow():
    """The counter sees growth where there is some."""
    assert peak(TINY, 6, 1024, 1024) > 1.9 * peak(TINY, 6, 512, 512)


def test_taps_of_earlier_chunks_are_gone(monkeypatch: pytest.MonkeyPatch):
    """Planted defect: a consumer that keeps the taps makes the peak grow with the prompt."""
    kept: list[Tensor] = []

    def keeping(*args: object, **kwargs: object) -> Tensor:
        return prefill(*args, **{**kwargs, "on_taps": kept.append})

    fair = peak(TINY, 6, 1280)
    monkeypatch.setattr(prefill_memory, "prefill", keeping)
    assert peak(TINY, 6, 1280) > fair + 6 * kept[0].nbytes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "memory.json"
    asked = ["--layers", "3", "--tokens", "40", "--chunk", "16", "--whole", "--json", str(out)]
    assert main(asked) == 0
    document = json.loads(out.read_text())
    assert_headed(document, "prefill_memory", asked, None)
    chunked, whole = document["rows"]
    assert (chunked["chunk"], whole["chunk"]) == (16, 40)
    assert chunked["peak_bytes"] < whole["peak_bytes"]
    assert "peak MB" in capsys.readouterr().out
    assert main(["--tokens", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_deeper_keeps_the_kinds_of_layers():
    config = deeper(7, replace(TINY, num_hidden_layers=3, full_attention_layers=(2,)))
    assert config.full_attention_layers == (2, 5, 6)


@pytest.mark.parametrize("name", ["k3", "llama", "mistral-window", "qwen3-next"])
def test_a_batch_of_prompts_is_read_in_passes_too(name: str, monkeypatch: pytest.MonkeyPatch):
    """Short prompts sit out the first passes; every text is that of its prompt alone."""
    model = target(TINY) if name == "k3" else hf_target(tiny_hf(name), name=name, end_token_ids=())
    prompts = [tiny_tokens(1, n, seed=n)[0].tolist() for n in (23, 2, 9, 17)]
    expected = [
        plain_generate(model, p, max_new_tokens=6, sampling=SamplingParams()).tokens
        for p in prompts
    ]
    passes: list[int] = []
    forward = type(model).forward

    def counted(self: object, tokens: Tensor, *args: object, **kwargs: object) -> object:
        passes.append(tokens.shape[1])
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(plain, "PREFILL_CHUNK", 20)
    monkeypatch.setattr(type(model), "forward", counted)
    got = generate_batch(model, prompts, max_new_tokens=6, sampling=SamplingParams())
    assert got == expected
    assert passes[:6] == [5, 5, 5, 5, 3, 1]
