"""Files are whole or absent, whenever the process dies."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dspark.errors import UserError
from dspark.files import (
    atomic_folder,
    atomic_write_json,
    atomic_write_text,
    prepare_folder,
    prepared_folder,
    read_json,
    recover_folder,
)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _run_until_killed(code: str, folder: Path) -> None:
    """Run `code` in its own process, which must end by SIGKILL, as a power cut would end it."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr


def test_text_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    atomic_write_text(path, "old\n")
    atomic_write_text(path, "new π\n")
    assert path.read_bytes() == "new π\n".encode()
    assert _names(path.parent) == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        atomic_write_text(tmp_path / "a.txt", "x")
        with atomic_folder(tmp_path / "f"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o755


def test_failed_write_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(path, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")  # fails in the middle of writing, not before
    assert read_json(path) == {"a": 1}
    assert _names(tmp_path) == ["a.json"]


def test_kill_while_writing_text_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old")
    _run_until_killed(
        """
        import os, signal, sys
        from dspark import files
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        files.atomic_write_text(sys.argv[1] + "/a.txt", "new" * 10000)
        """,
        tmp_path,
    )
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("text", "place"),
    [("{", ":1:"), ('{"a": 1,\n "b": }', ":2:"), ('{"a": 1}\nx', ":2:")],
)
def test_bad_json_names_file_and_line(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"a.json{place}"):
        read_json(path)


def test_unreadable_json_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(UserError, match="folder"):
        read_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UserError, match="UTF-8"):
        read_json(tmp_path / "latin.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / "latin.json" / "below.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / "deep.json")


def test_json_is_plain_and_round_trips(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, "π"], "b": {"c": True}}
    atomic_write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == value


def test_folder_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("1")
        assert not final.exists()
        assert folder.parent == final.parent  # same file system, or the rename would copy
    assert (final / "sub" / "a").read_text() == "1"
    assert _names(tmp_path) == ["checkpoint"]


def test_folder_replaces_all_of_the_old(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    for name in ("old", "new"):
        with atomic_folder(final) as folder:
            (folder / name).write_text(name)
    assert _names(final) == ["new"]
    assert _names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_inside_keeps_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "old").write_text("old")
    with pytest.raises(error), atomic_folder(final) as folder:
        (folder / "half").write_text("half")
        raise error
    assert _names(final) == ["old"]
    assert _names(tmp_path) == ["checkpoint"]


def test_failure_of_the_swap_puts_the_old_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "old").write_text("old")
    rename = os.replace

    def failing(source: str | Path, goal: str | Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        rename(source, goal)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space"), atomic_folder(final) as folder:
        (folder / "new").write_text("new")
    assert _names(final) == ["old"]
    assert _names(tmp_path) == ["checkpoint"]


def test_kill_inside_keeps_the_old_folder(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "old").write_text("old")
    _run_until_killed(
        """
        import os, signal, sys
        from dspark.files import atomic_folder
        with atomic_folder(sys.argv[1] + "/checkpoint") as folder:
            (folder / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert _names(final) == ["old"]


def test_kill_between_the_renames_is_recovered(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "old").write_text("old")
    _run_until_killed(
        """
        import os, signal, sys
        from dspark.files import atomic_folder
        rename = os.replace
        def one_rename(source, goal):
            rename(source, goal)
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace = one_rename
        with atomic_folder(sys.argv[1] + "/checkpoint") as folder:
            (folder / "new").write_text("new")
        """,
        tmp_path,
    )
    recover_folder(final)
    assert _names(final) == ["old"]
    recover_folder(final)  # nothing left to do
    assert _names(final) == ["old"]


def test_kill_after_the_renames_keeps_the_new(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with atomic_folder(final) as folder:
        (folder / "old").write_text("old")
    _run_until_killed(
        """
        import os, shutil, signal, sys
        from dspark.files import atomic_folder
        shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        with atomic_folder(sys.argv[1] + "/checkpoint") as folder:
            (folder / "new").write_text("new")
        """,
        tmp_path,
    )
    recover_folder(final)
    assert _names(final) == ["new"]
    assert not (tmp_path / ".checkpoint.old").exists()


def test_folder_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("precious")
    with pytest.raises(UserError, match="is a file"), atomic_folder(tmp_path / "checkpoint"):
        pass
    assert (tmp_path / "checkpoint").read_text() == "precious"


def test_a_folder_is_prepared_before_long_work_or_refused(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b")
    prepare_folder(tmp_path / "a" / "b")  # again is fine
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/x: cannot be made"):
        prepare_folder(tmp_path / "file" / "x")


def test_a_made_folder_goes_again_if_nothing_came_of_it(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for folder in (tmp_path / "a" / "b", old):
        with pytest.raises(KeyboardInterrupt), prepared_folder(folder):
            assert list(folder.iterdir()) == []
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [old]
    with pytest.raises(KeyboardInterrupt), prepared_folder(tmp_path / "c" / "d"):
        (tmp_path / "c" / "kept").write_text("")
        raise KeyboardInterrupt
    assert list((tmp_path / "c").iterdir()) == [tmp_path / "c" / "kept"]
    with prepared_folder(tmp_path / "e"):
        pass
    assert (tmp_path / "e").is_dir()


def test_a_folder_that_takes_no_file_is_refused_by_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some folders say that they can be written, and take nothing: /proc, for who may do all."""

    def refuse(*given: object, **named: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/x/.name.k0c5cb2h.tmp")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    asked = f"--rounds {tmp_path / 'x'}"
    with pytest.raises(UserError, match=f"^{re.escape(asked)}: cannot be written .No such file"):
        prepare_folder(tmp_path, asked)
    with pytest.raises(FileNotFoundError) as told:
        atomic_write_text(tmp_path / "x", "text")
    assert told.value.filename == str(tmp_path / "x")
