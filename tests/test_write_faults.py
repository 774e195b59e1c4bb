"""Every single call that writes a checkpoint may fail: one line, and the last good one is kept."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from dspark import files
from dspark.distill.disk import clear_leftovers, writing
from dspark.distill.state import manifest_fault
from dspark.errors import UserError
from tests.distill_setup import config, run, same, weights
from tests.test_resume import checkpoints, stop_at

CALLS = (
    (os, "replace"),
    (files, "_sync"),
    (files, "_sync_folder"),
    (tempfile, "mkstemp"),
    (tempfile, "mkdtemp"),
    (Path, "mkdir"),
    (Path, "write_text"),
    # wherever a module of ours has it by name
    *((m, "save_file") for n, m in list(sys.modules.items()) if n.startswith("dspark.")
      and hasattr(m, "save_file")),
)  # fmt: skip
"""Everything through which a checkpoint reaches the disk."""


class Faults:
    """Counts calls in CALLS, and has call number `fail_at` end with `code`."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int, code: int) -> None:
        self.fail_at, self.code, self.names = fail_at, code, list[str]()
        for owner, name in CALLS:
            patch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.names.append(call.__name__)
            if len(self.names) == self.fail_at:
                text = os.strerror(self.code)
                if call.__name__ == "save_file":  # safetensors tells it in words alone
                    raise SafetensorError(f"I/O error: {text} (os error {self.code})")
                raise OSError(self.code, text)
            return call(*args, **kwargs)

        return watched


def interrupted(out: Path) -> Any:
    """A run that was stopped after step 11 and will save once more, at its end."""
    settings = config(out, out__checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(settings, on_step=stop_at(10))
    assert checkpoints(out) == ["step-000011"]
    return settings


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left to write it"),
        (errno.EROFS, "cannot be written (Read-only file system)"),
        (errno.EIO, "cannot be written (Input/output error)"),
    ],
)
def test_a_fault_at_every_call_of_a_save(tmp_path: Path, code: int, words: str) -> None:
    interrupted(tmp_path / "base")
    straight, _, _ = run(config(tmp_path / "straight"))
    every = code == errno.ENOSPC  # the others differ in words only
    out, failed = tmp_path / "run", list[str]()
    for number in range(1, 100):
        shutil.copytree(tmp_path / "base", out)
        settings = config(out, out__checkpoint_every=100)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, number, code)
            try:
                run(settings)
                break
            except UserError as error:
                message = str(error)
        failed.append(faults.names[number - 1])
        assert words in message
        assert "step-000012" in message
        assert "\n" not in message
        assert manifest_fault(out / "checkpoints" / "step-000011") is None
        if every:
            made, progress, _ = run(settings)
            assert progress.step == 12
            assert same(weights(made), weights(straight)), f"call {number}, {failed[-1]}"
            assert not list((out / "checkpoints").glob(".*"))
        shutil.rmtree(out)
    else:
        pytest.fail("a save takes fewer calls than this")
    assert len(failed) > 15
    assert {name for _, name in CALLS} - {"mkdir"} <= set(failed)


def test_leftovers_are_finished_or_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.old", ".b.x1.tmp", "c", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / ".d.x2.tmp").touch()
    (tmp_path / "e.tmp").touch()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "a", "c", "e.tmp"]
    clear_leftovers(tmp_path / "absent")


def test_an_error_without_a_number_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written \(odd thing"), writing(tmp_path):
        raise SafetensorError("odd\nthing happened")
    with pytest.raises(ValueError, match="not ours"), writing(tmp_path):
        raise ValueError("not ours")
