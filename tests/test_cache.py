"""Target states on disk: the states themselves, never another's, never a torn file's."""

from __future__ import annotations

import io
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from dspark.distill import cache, cache_build
from dspark.distill.batches import Batch, make_batch
from dspark.distill.cache import MANIFEST, CachedFeatures, plan_cache
from dspark.distill.cache_build import cached_features
from dspark.distill.cache_codec import Codec
from dspark.distill.chat import TrainingRow
from dspark.distill.lock import locked
from dspark.distill.objective import batch_sums
from dspark.distill.processes import Processes
from dspark.distill.settings import CacheSettings
from dspark.distill.taps import BadFeatures, Features, KeptFeatures
from dspark.distill.trainer import Trainer
from dspark.errors import UserError
from dspark.taps import TapSet
from tests.distill_setup import ALONE, SETTINGS, drafter, rows, same, trainer, weights
from tests.test_distributed import on_ranks
from tests.toy_target import ToyTarget

TAPS = TapSet((0, 2), "residual")
ORIGIN = {"target": "toy", "tokenizer": "t", "template": "c", "max_length": 24}
SMALL = 30_000
"""Bytes of a shard: three of the toy's rows in float32."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "PATIENCE", 0.0)

    def small(*args: Any) -> Any:
        return plan_cache(*args, shard_bytes=SMALL)

    monkeypatch.setattr(cache_build, "plan_cache", small)


def source(
    root: Path,
    target: ToyTarget | None = None,
    *,
    some: list[TrainingRow] | None = None,
    taps: TapSet = TAPS,
    processes: Processes = ALONE,
    origin: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, str]:
    """The source and what was printed. Float32 unless asked otherwise."""
    target = target or ToyTarget()
    text = io.StringIO()
    made = cached_features(
        root,
        target,
        taps,
        rows(target) if some is None else some,
        CacheSettings(**{"mode": "cached", "dtype": "float32", **settings}),
        origin or ORIGIN,
        processes,
        Console(file=text, width=400),
    )
    return made, text.getvalue()


def only_folder(root: Path) -> Path:
    [folder] = root.iterdir()
    return folder


def batch_of(some: list[TrainingRow], row_ids: list[int]) -> Batch:
    return make_batch(some, row_ids, anchors=3, seed=0, epoch=0)


class Counting(ToyTarget):
    """Counts its passes, and fails at the one it is told to."""

    passes = 0
    fail_at: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.passes == self.fail_at:
            raise KeyboardInterrupt
        self.passes += 1
        return super().forward(*args, **kwargs)


def different(count: int = 12) -> list[TrainingRow]:
    """Rows of 2..24 tokens."""
    return [
        TrainingRow(row.ids[: 2 + 2 * i], row.loss_mask[: 2 + 2 * i])
        for i, row in enumerate(rows(ToyTarget(), count))
    ]


# --- the states ----------------------------------------------------------------------------------


def test_a_float32_cache_holds_the_bits_of_states_kept_in_memory(tmp_path: Path) -> None:
    target, some = ToyTarget(), different()
    cached, _ = source(tmp_path, target, some=some)
    kept = KeptFeatures(target, TAPS, 2**30)
    for row_ids in ([0, 11, 5], [3], []):
        batch = batch_of(some, row_ids)
        ours, theirs = cached(batch), kept(batch)
        if row_ids:
            assert torch.equal(ours.taps, theirs.taps)
            assert torch.equal(ours.hidden, theirs.hidden)
        assert ours.taps.shape == theirs.taps.shape
        assert not ours.taps[~batch.valid].any()


def test_what_is_stored_is_the_state_whose_logits_the_target_draws_from(tmp_path: Path) -> None:
    target, some = ToyTarget(), different()
    cached, _ = source(tmp_path, target, some=some)
    expected = target.logits(target.states(torch.tensor(some[7].ids)))
    assert torch.equal(target.logits(cached(batch_of(some, [7])).hidden)[0], expected)
    manifest = json.loads((only_folder(tmp_path) / MANIFEST).read_text())
    assert manifest["key"]["hidden_is_post_norm"] is True


def test_training_from_a_float32_cache_gives_the_very_weights_of_kept_states(
    tmp_path: Path,
) -> None:
    def steps(made: Trainer) -> dict[str, Tensor]:
        for step in range(6):
            made.run_step(step)
        return weights(made)

    target = ToyTarget()
    settings = replace(SETTINGS, epochs=2)
    kept = steps(trainer(settings, target=target))
    cached, _ = source(tmp_path, target)
    ours = steps(Trainer(target, drafter(target), rows(target), settings, ALONE, cached))
    assert same(ours, kept)
    rough, _ = source(tmp_path, target, dtype="float8")
    assert not same(
        steps(Trainer(target, drafter(target), rows(target), settings, ALONE, rough)), kept
    )


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-4), ("float8", 5e-3)])
def test_what_rounding_does_to_the_loss(tmp_path: Path, dtype: str, limit: float) -> None:
    """Bounds that the toy keeps with room to spare; a lost scale or tap is off by far more."""
    target, some = ToyTarget(), rows(ToyTarget())
    made, batch = trainer(target=target), batch_of(some, list(range(16)))
    exact = batch_sums(target, made.drafter, batch, SETTINGS, source(tmp_path, target)[0])
    rough = batch_sums(
        target, made.drafter, batch, SETTINGS, source(tmp_path, target, dtype=dtype)[0]
    )
    assert rough.loss().item() == pytest.approx(exact.loss().item(), rel=limit)
    assert rough.loss().item() != exact.loss().item()


def test_float8_is_as_close_as_its_mantissa_with_a_scale_per_token_and_tap() -> None:
    generator = torch.Generator().manual_seed(1)
    codec = Codec(taps=3, hidden=64, stored="float8", native=torch.float32)
    sizes = torch.tensor([1e-30, 1e-4, 1.0, 300.0, 1e30])[:, None, None]  # every token its own
    loud = torch.tensor([1.0, 1e3, 1e-3])[:, None]  # and every tap
    taps = sizes * loud * torch.randn(5, 3, 64, generator=generator)
    hidden = sizes[:, 0] * torch.randn(5, 64, generator=generator)
    given = Features(taps.reshape(1, 5, 192), hidden[None])
    read = codec.decode(codec.encode(given))
    for ours, true in ((read.taps.reshape(5, 3, 64), taps), (read.hidden[0], hidden)):
        scale = true.abs().amax(-1, keepdim=True) / 448
        bound = torch.maximum(true.abs() / 16, scale / 1024) * 1.0001
        assert ((ours - true).abs() <= bound).all()


def test_zeros_and_values_too_small_for_a_scale_stay_finite() -> None:
    codec = Codec(taps=1, hidden=4, stored="float8", native=torch.float32)
    values = torch.tensor([[0.0, 0, 0, 0], [1e-45, -1e-45, 0, 0], [3.4e38, -3.4e38, 1, 0]])[None]
    read = codec.decode(codec.encode(Features(values, values)))
    assert torch.isfinite(read.taps).all()
    assert not read.taps[0, :1].any()
    assert read.hidden[0, 2, 0] == pytest.approx(3.4e38, rel=1e-6)


def test_a_bfloat16_target_is_stored_without_loss() -> None:
    values = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for stored in ("bfloat16", "float32"):
        codec = Codec(taps=1, hidden=8, stored=stored, native=torch.bfloat16)
        read = codec.decode(codec.encode(Features(values, values)))
        assert torch.equal(read.taps, values)
        assert read.taps.dtype == torch.bfloat16


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_the_size_is_known_before_and_said(tmp_path: Path, dtype: str) -> None:
    some = rows(ToyTarget(), 40)
    made, text = source(tmp_path, some=some, dtype=dtype)
    folder = only_folder(tmp_path)
    written = sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
    predicted = made._plan.bytes(made._plan.shards)
    assert predicted == pytest.approx(written, rel=0.05)
    # By hand: 40 rows of 24 tokens, two taps and the hidden state of 32 channels.
    per_token = {"float32": 3 * 32 * 4, "bfloat16": 3 * 32 * 2, "float8": 3 * (32 + 4)}[dtype]
    assert predicted == pytest.approx(40 * 24 * per_token, rel=0.05)
    assert f"40 rows, 960 tokens, {predicted / 1e6:.2f} MB as {dtype}" in text
    assert "of disk free" in text


def test_rows_that_go_together_have_the_states_of_rows_alone(tmp_path: Path) -> None:
    target, some = Counting(), different()
    alone, _ = source(tmp_path / "alone", target, some=some)
    assert target.passes == 12
    together, _ = source(tmp_path / "together", target, some=some, rows=5)
    shards = len(list(only_folder(tmp_path / "together").glob("*.safetensors")))
    assert 12 + 12 / 5 <= target.passes < 12 + 12 / 5 + shards, "whole groups, but for each last"
    batch = batch_of(some, [0, 11, 5, 3])
    torch.testing.assert_close(together(batch).taps, alone(batch).taps)
    torch.testing.assert_close(together(batch).hidden, alone(batch).hidden)


def test_more_than_max_gib_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"more than cache\.max_gib, 0\.0001; .*float|.*smaller"):
        source(tmp_path / "states", max_gib=0.0001)
    assert not (tmp_path / "states").exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    size = 16 * 24 * 3 * 32 * 4
    room = cache_build.HEADROOM + size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(room, 0, room))  # no spare
    with pytest.raises(UserError, match=r"do not fit into 2\.15 GB of free disk"):
        source(tmp_path / "states")
    assert not (tmp_path / "states").exists()
    room = cache_build.HEADROOM + int(1.2 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(room, 0, room))
    source(tmp_path / "states")
    # What is there already needs no room.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))
    source(tmp_path / "states")


# --- the key -------------------------------------------------------------------------------------


def test_everything_that_changes_the_states_changes_the_folder(tmp_path: Path) -> None:
    target, some = ToyTarget(), rows(ToyTarget())
    altered = [replace(some[0], ids=(*some[0].ids[:-1], some[0].ids[-1] ^ 1)), *some[1:]]

    def key(*, dtype: str = "float32", native: torch.dtype = torch.float32, ids: Any = None,
            **changes: Any) -> str:  # fmt: skip
        origin = ORIGIN | {"tap_ids": [0, 2], "tap_kind": "residual", "device": "cpu"} | changes
        codec = Codec(2, target.hidden_size, dtype, native)
        return plan_cache(tmp_path, [r.ids for r in ids or some], codec, origin).folder.name

    names = [
        key(), key(dtype="bfloat16"), key(native=torch.bfloat16), key(ids=altered),
        key(ids=some[:-1]), key(target="other"), key(tokenizer="other"), key(template="other"),
        key(max_length=25), key(tap_ids=[0, 1]), key(tap_kind="raw_prefix"), key(device="cuda"),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert key() == names[0]


def test_states_of_another_target_are_never_read(tmp_path: Path) -> None:
    target, some = Counting(), different()
    source(tmp_path, target, some=some)
    other = Counting()
    other.weights = {name: tensor * 1.01 for name, tensor in other.weights.items()}
    cached, text = source(tmp_path, other, some=some, origin=ORIGIN | {"target": "other"})
    assert other.passes == len(some)
    assert "1 more cache(s) of other states" in text
    assert torch.equal(
        cached(batch_of(some, [9])).hidden[0], other.states(torch.tensor(some[9].ids))
    )


def test_equal_rows_are_stored_once(tmp_path: Path) -> None:
    target, some = Counting(), different()
    source(tmp_path, target, some=[*some, *some])
    assert target.passes == len(some)


# --- kills and damage ----------------------------------------------------------------------------


def test_a_complete_cache_is_not_computed_again(tmp_path: Path) -> None:
    source(tmp_path)
    target = Counting()
    _, text = source(tmp_path, target)
    assert target.passes == 0
    assert "complete and checked: 6 shards" in text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_damaged_shard_is_made_again_and_no_other(
    tmp_path: Path, damage: Any, suffix: str
) -> None:
    target, some = ToyTarget(), rows(ToyTarget())
    whole, _ = source(tmp_path, target)
    batch = batch_of(some, [3, 4, 5])
    expected = whole(batch)
    folder = only_folder(tmp_path)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    damage(folder / f"shard-00001.{suffix}")
    again = Counting()
    mended, text = source(tmp_path, again)
    assert again.passes == 3  # the rows of one shard
    assert "1 of 6 shards to write" in text
    assert torch.equal(mended(batch).taps, expected.taps)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_build_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    target = Counting()
    target.fail_at = 7  # two shards of three rows are safe, the third is not
    with pytest.raises(KeyboardInterrupt):
        source(tmp_path, target)
    folder = only_folder(tmp_path)
    (folder / ".shard-00002.safetensors.abcd.tmp").write_bytes(b"half")  # as SIGKILL leaves it
    again = Counting()
    source(tmp_path, again)
    assert again.passes == 16 - 6
    assert not list(folder.glob(".*"))


def test_a_full_disk_while_writing_is_one_line_and_finished_shards_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    save, calls = cache_build.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path)

    monkeypatch.setattr(cache_build, "save_file", full)
    with pytest.raises(UserError, match=r"shard-00002\.safetensors: no space left to write it"):
        source(tmp_path)
    target = Counting()
    source(tmp_path, target)
    assert target.passes == 16 - 6


def test_a_shard_that_vanishes_while_training_is_named(tmp_path: Path) -> None:
    cached, _ = source(tmp_path)
    shutil.rmtree(only_folder(tmp_path))
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: target states cannot be read"):
        cached(batch_of(rows(ToyTarget()), [0]))


def test_two_runs_do_not_write_the_same_cache(tmp_path: Path) -> None:
    source(tmp_path)
    with (
        locked(only_folder(tmp_path), "wait"),
        pytest.raises(UserError, match="in use by process"),
    ):
        source(tmp_path)


def test_a_run_waits_for_another_that_makes_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path)
    held = locked(only_folder(tmp_path), "wait")
    held.__enter__()
    waits: list[float] = []

    def let_go(seconds: float) -> None:
        waits.append(seconds)
        held.__exit__(None, None, None)

    monkeypatch.setattr(cache_build, "PATIENCE", 3600.0)
    monkeypatch.setattr("dspark.distill.lock.time.sleep", let_go)
    source(tmp_path)
    assert len(waits) == 1


def test_states_that_were_read_are_kept_within_the_budget(tmp_path: Path) -> None:
    cached, _ = source(tmp_path)
    target = ToyTarget()
    some = rows(target)
    first = cached(batch_of(some, [0]))
    size = sum(x.numel() * x.element_size() for x in (first.taps, first.hidden))
    keeping = CachedFeatures(cached._plan, torch.device("cpu"), size)
    kept = keeping(batch_of(some, [0]))
    keeping(batch_of(some, [1]))  # does not fit any more
    shutil.rmtree(only_folder(tmp_path))
    assert torch.equal(keeping(batch_of(some, [0])).taps, kept.taps)
    with pytest.raises(UserError, match="cannot be read"):
        keeping(batch_of(some, [1]))


def test_a_state_that_is_not_finite_stops_the_build(tmp_path: Path) -> None:
    target, some = ToyTarget(), rows(ToyTarget())
    target.weights["history"][0][some[4].ids[6]] = torch.nan
    with pytest.raises(BadFeatures, match="not finite in row"):
        source(tmp_path, target, some=some)


# --- several processes ---------------------------------------------------------------------------


def built(processes: Processes, root: str, broken: bool) -> tuple[str, int]:
    """(error, passes) of a build by these processes."""
    target = Counting()
    some = rows(ToyTarget())
    if broken:
        target.weights["history"][0][some[4].ids[6]] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        try:
            cached, _ = source(Path(root), target, some=some, processes=processes)
        except UserError as error:
            return str(error), target.passes
    batch = batch_of(some, list(range(16)))
    assert torch.equal(cached(batch).taps, KeptFeatures(target, TAPS, 0)(batch).taps)
    return "", target.passes


@pytest.mark.slow
def test_shards_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    source(tmp_path / "one")
    expected = {p.name: p.read_bytes() for p in only_folder(tmp_path / "one").iterdir()}
    for world in (2, 4):
        root = tmp_path / str(world)
        assert [error for error, _ in on_ranks(world, built, str(root), False)] == [""] * world
        assert {p.name: p.read_bytes() for p in only_folder(root).iterdir()} == expected
        flip(only_folder(root) / "shard-00003.safetensors")
        passes = [count - 16 for _, count in on_ranks(world, built, str(root), False)]
        assert sorted(passes) == [0] * (world - 1) + [3]  # 16: the comparison in the job


@pytest.mark.slow
def test_a_fault_on_one_process_stops_the_build_on_all(tmp_path: Path) -> None:
    results = on_ranks(2, built, str(tmp_path), True)
    assert all("not finite in row" in error for error, _ in results)


def test_shards_are_cut_by_length_alone() -> None:
    shards = cache._cut([5, 5, 5, 20, 1, 1], 10)
    assert [(s.first, s.last, s.tokens) for s in shards] == [
        (0, 2, 10), (2, 3, 5), (3, 4, 20), (4, 6, 2),
    ]  # fmt: skip
    assert cache._cut([], 10) == ()
