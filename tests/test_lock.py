"""One process per folder, and a lock that nobody has to remove by hand."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dspark.distill import lock
from dspark.distill.lock import LOCK_FILE, locked
from dspark.errors import UserError


def hold(folder: str, pipe: Any) -> None:
    with locked(Path(folder), "wait"):
        pipe.send(os.getpid())
        pipe.recv()


def holder(folder: Path) -> tuple[Any, Any, int]:
    """A process that holds the folder: itself, its pipe, its id."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(folder), theirs))
    process.start()
    theirs.close()
    assert ours.poll(60)
    return process, ours, ours.recv()


def test_the_second_one_learns_who_the_first_is(tmp_path: Path) -> None:
    process, pipe, pid = holder(tmp_path)
    try:
        words = f"in use by process {pid} on {socket.gethostname()}; choose another"
        with pytest.raises(UserError, match=words), locked(tmp_path, "choose another"):
            pass
        pipe.send("leave")
        process.join(60)
        with locked(tmp_path, "choose another"):
            assert (tmp_path / LOCK_FILE).exists()
        assert not list(tmp_path.iterdir())
    finally:
        process.kill()


def test_whoever_waits_is_told_once_whom_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, pipe, pid = holder(tmp_path)
    monkeypatch.setattr(lock, "POLL", 0.01)
    sleep, naps, lines = time.sleep, [], []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            pipe.send("leave")
            process.join(60)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", nap)
    try:
        with locked(tmp_path, "wait", patience=600.0, waiting=lines.append):
            pass
        assert lines == [
            f"{tmp_path}: waiting for process {pid} on {socket.gethostname()}, at most 10 minutes"
        ]
        assert len(naps) >= 5
    finally:
        process.kill()


def test_a_killed_holder_leaves_nothing_to_clean_up(tmp_path: Path) -> None:
    process, _, pid = holder(tmp_path)
    process.kill()
    process.join()
    assert f"process {pid} " in (tmp_path / LOCK_FILE).read_text()  # stale, and of no meaning
    with locked(tmp_path, "wait"):
        assert f"process {os.getpid()} " in (tmp_path / LOCK_FILE).read_text()


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_file_swapped_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    """Its holder removed it between our open and our lock: ours would be a file nobody sees.

    Or a third one has made it again by then, and holds that.
    """
    import fcntl

    take, calls = fcntl.flock, []

    def slow(handle: int, flags: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / LOCK_FILE).unlink()
            if made_again:
                (tmp_path / LOCK_FILE).touch()
        take(handle, flags)

    monkeypatch.setattr(fcntl, "flock", slow)
    with locked(tmp_path, "wait"):
        assert len(calls) == 2
        with pytest.raises(UserError, match="in use by process"), locked(tmp_path, "wait"):
            pass


def test_folders_made_for_the_lock_alone_are_removed_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="mistake"), locked(folder, "wait"):
        raise ValueError("mistake")
    assert not (tmp_path / "a").exists()
    with locked(folder, "wait"):
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"),
        locked(tmp_path, "wait"),
    ):
        pass
