"""Writing that fails in one line, and tidying up after writing that was killed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dspark.errors import UserError
from dspark.files import recover_folder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, over quota, over the size limit


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system has against writing `path` into one clear UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = _code(error)
        if code in _FULL:
            what, remedy = "no space left to write it", "free some space"
        else:
            reason = os.strerror(code) if code else str(error).replace("\n", " ")
            what, remedy = f"cannot be written ({reason})", "make the folder writable"
        raise UserError(
            f"{path}: {what}; earlier checkpoints are intact; {remedy} and continue with --resume"
        ) from error


def _code(error: OSError | SafetensorError) -> int | None:
    """The operating system's number; safetensors reports it as text only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else None


def clear_leftovers(folder: Path) -> None:
    """Finish or remove what a kill left of atomic writes in `folder`, which must be locked.

    See `dspark.files`: `.NAME.old` is a folder renamed aside, `.NAME.xxxx.tmp` a fragment.
    """
    for aside in folder.glob(".*.old"):
        recover_folder(folder / aside.name.removeprefix(".").removesuffix(".old"))
    for fragment in folder.glob(".*.tmp"):
        if fragment.is_dir():
            shutil.rmtree(fragment, ignore_errors=True)
        else:
            fragment.unlink(missing_ok=True)
