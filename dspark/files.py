"""Files that are either whole or absent.

A run may be killed at any moment. Whoever reads a path written here sees the old content or the
new content, never a half. The rule is the usual one: write a sibling, flush it to the disk, rename
it over the final name, flush the folder that holds the name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import UserError


def prepare_folder(folder: Path | str, asked: str | None = None) -> None:
    """Make a folder that long work will write into, before the work.

    Raises UserError where it cannot be made or written, which begins with what was `asked` for (an
    option and its value; None: the folder).
    """
    folder = Path(folder)
    asked = str(folder) if asked is None else asked
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{asked}: cannot be made ({error.strerror}); choose another place to write to"
        ) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{asked}: cannot be written; choose another place to write to")
    try:  # whoever may do everything may not write everywhere: /proc takes no file
        tempfile.NamedTemporaryFile(prefix=".", suffix=".tmp", dir=folder).close()
    except OSError as error:
        raise UserError(
            f"{asked}: cannot be written ({error.strerror}); choose another place to write to"
        ) from None


@contextmanager
def prepared_folder(folder: Path | str, asked: str | None = None) -> Iterator[None]:
    """`prepare_folder`; where the body fails or is interrupted, what was made goes if empty."""
    folder = Path(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        prepare_folder(folder, asked)
        yield
    except BaseException:
        for place in made:  # the innermost first
            try:
                place.rmdir()
            except OSError:  # something was written there, or it was never made
                break
        raise


@contextmanager
def atomic_file(final: Path | str) -> Iterator[Path]:
    """Yield a fresh sibling file that replaces `final` if the body succeeds, else is removed.

    Missing parent folders are made. A kill leaves the old `final` and a `.NAME.xxxx.tmp` at most.
    """
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent)
    except OSError as error:  # nobody asked for a file of the sibling's name
        raise OSError(error.errno, error.strerror, str(final)) from None
    os.close(handle)
    try:
        yield Path(name)
        _sync(Path(name), os.O_RDONLY)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes private files; ours are ordinary ones
        os.replace(name, final)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(final.parent)


def atomic_write_text(path: Path | str, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step; missing parent folders are made."""
    with atomic_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")


def atomic_write_json(path: Path | str, obj: Any) -> None:
    """Replace `path` by `json_text(obj)` in one step."""
    atomic_write_text(path, json_text(obj))


def json_text(obj: Any) -> str:
    """`obj` as indented JSON with a final newline; NaN and infinity are refused (`ValueError`).

    JSON has no NaN, and most readers choke on Python's spelling of it. Not measured is `None`.
    """
    return json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path | str) -> Any:
    """Parse a JSON file; a missing or malformed one is a `UserError` that names file and line."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a JSON file was expected") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; a JSON file was expected") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); expected JSON") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: expected JSON: {error.msg} at column {error.colno}"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # huge integers, absurd nesting
        raise UserError(f"{path}: JSON that cannot be read ({error})") from None


@contextmanager
def atomic_folder(final: Path | str) -> Iterator[Path]:
    """Yield a fresh sibling folder that becomes `final` if the body succeeds, else is removed.

    An existing `final` folder is replaced: the old one is renamed aside, the new one renamed in,
    the old one deleted. POSIX cannot swap two non-empty folders portably, so a kill exactly
    between the two renames leaves the old content under `.NAME.old`; the next write, or
    `recover_folder`, puts it back. At no moment is the content of both lost.
    """
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(final)
    if final.exists() and not final.is_dir():
        raise UserError(f"{final}: is a file; a folder would be written here; choose another name")
    fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    try:
        os.chmod(fresh, 0o777 & ~_umask())
        yield fresh
        _sync_tree(fresh)
        _swap_in(fresh, final)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def recover_folder(final: Path | str) -> None:
    """Finish what a kill inside `atomic_folder`'s swap interrupted; a no-op otherwise."""
    final = Path(final)
    aside = _aside(final)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        os.replace(aside, final)


def _swap_in(fresh: Path, final: Path) -> None:
    aside = _aside(final)
    if final.exists():
        os.replace(final, aside)
    try:
        os.replace(fresh, final)
    except BaseException:
        if aside.exists() and not final.exists():
            os.replace(aside, final)
        raise
    _sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _sync_tree(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        if entry.is_file():
            _sync(entry, os.O_RDONLY)
        elif entry.is_dir():
            _sync_folder(entry)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    # Windows cannot open a folder; there the rename itself is what we rely on.
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
