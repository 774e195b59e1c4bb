"""A whole run whose target states lie on disk, and two runs that want the same folder."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dspark.distill.lock import locked
from dspark.errors import UserError
from dspark.runtime.k3_target import K3Target
from tests.test_distill_run import distill, prompt_file, settings, target_folder  # noqa: F401
from tests.test_lock import holder


@pytest.fixture
def make(
    target_folder: Path,  # noqa: F811
    prompt_file: Path,  # noqa: F811
    tmp_path: Path,
) -> Any:
    """`make(name, **changes)`: a run of six steps with states on disk in float32."""

    def made(name: str, **changes: Any) -> Any:
        cached = {"cache__mode": "cached", "cache__dtype": "float32", "train__max_steps": 6}
        return settings(target_folder, prompt_file, tmp_path / name, **(cached | changes))

    return made


def model(config: Any) -> bytes:
    return (Path(config.out.dir) / "model.safetensors").read_bytes()


def test_states_on_disk_in_float32_end_with_the_bytes_of_states_in_memory(make: Any) -> None:
    online, cached, rough = (
        make("online", cache__mode="online"), make("cached"), make("rough", cache__dtype="float8"),
    )  # fmt: skip
    distill(online)
    text = distill(cached)
    assert "target states: 20 rows" in text  # those held out too
    assert model(cached) == model(online)
    distill(rough)
    assert model(rough) != model(online)


def test_runs_share_a_folder_of_states_and_the_second_computes_none(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = str(tmp_path / "shared")
    first, second = (make(name, cache__dir=shared) for name in ("first", "second"))
    forward, passes = K3Target.forward, [0]

    def counted(target: K3Target, *args: Any, taps: Any = None, **kwargs: Any) -> Any:
        passes[-1] += taps is not None
        return forward(target, *args, taps=taps, **kwargs)

    monkeypatch.setattr(K3Target, "forward", counted)
    distill(first)
    shutil.copytree(Path(first.out.dir) / "rows", Path(second.out.dir) / "rows")
    passes.append(0)
    assert "complete and checked" in distill(second)
    assert passes[1] == passes[0] - 20  # decoding for evaluation taps too
    assert model(second) == model(first)
    assert not (Path(second.out.dir) / "states").exists()


def test_the_folder_may_change_on_resume_and_the_dtype_may_not(make: Any, tmp_path: Path) -> None:
    distill(make("run"))
    with pytest.raises(UserError, match=r"cache\.dtype was 'float32', now 'float8'"):
        distill(make("run", cache__dtype="float8"), resume=True)
    distill(make("run", cache__dir=str(tmp_path / "elsewhere")), resume=True)
    assert (tmp_path / "elsewhere").is_dir()


def test_a_short_disk_is_one_line_and_costs_no_answers(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1_000_000))
    config = make("run")
    with pytest.raises(UserError, match=r"do not fit into 1\.00 MB of free disk.*cache\.mode"):
        distill(config)
    monkeypatch.undo()
    monkeypatch.setattr("dspark.distill.answers.build_rows", None)
    distill(config)


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(make: Any) -> None:
    config = make("run")
    out = Path(config.out.dir)
    process, pipe, pid = holder(out)
    try:
        for resume in (False, True):
            with pytest.raises(UserError, match=f"{out}: in use by process {pid} on"):
                distill(config, resume=resume)
        assert [path.name for path in out.iterdir()] == [".lock"]
        pipe.send("leave")
        process.join(60)
        distill(config)
        assert not (out / ".lock").exists()
    finally:
        process.kill()


def test_the_lock_is_free_again_after_a_mistake(make: Any) -> None:
    config = make("run", drafter__tap_kind="residual")
    with pytest.raises(UserError, match="tap_kind"):
        distill(config)
    assert not Path(config.out.dir).exists()
    with locked(Path(config.out.dir), "wait"):
        pass
