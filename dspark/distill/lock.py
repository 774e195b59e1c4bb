"""One run per folder: two that write the same checkpoints would ruin both.

The lock is `flock` on `FOLDER/.lock`. The kernel drops it when its holder ends, however it ends, so
a killed run never leaves a stale lock behind; the file itself means nothing. It holds the process
and the machine, for the message to whoever comes second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.distill.disk import writing
from dspark.errors import UserError

LOCK_FILE = ".lock"
POLL = 0.2
"""Seconds between two looks at a lock that is waited for."""


@contextmanager
def locked(
    folder: Path,
    instead: str,
    patience: float = 0.0,
    waiting: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold `folder` (made if missing, removed again if it is still empty at the end).

    Raises UserError naming the holder if another process still has it after `patience` seconds;
    `instead` says what else to do. `waiting` gets one line for each holder that is waited for.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK_FILE
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _take(path, instead, patience, waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits for it looks again
        os.close(handle)
        for empty in made:
            try:
                empty.rmdir()
            except OSError:  # somebody keeps something here by now
                break


def _take(path: Path, instead: str, patience: float, waiting: Callable[[str], None] | None) -> int:
    """An open, locked file that is the one at `path`."""
    # fcntl is imported here since only POSIX systems have it. On NFS, flock works between machines
    # from Linux 2.6.12 on and not with the mount option local_lock=flock or nolock: there, two
    # machines could both hold it, and the folder is theirs to watch over.
    import fcntl

    until, told = time.monotonic() + patience, ""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            if time.monotonic() >= until:
                raise UserError(f"{path.parent}: in use by {holder}; {instead}") from None
            if waiting is not None and holder != told:
                waiting(f"{path.parent}: waiting for {holder}, at most {patience / 60:.0f} minutes")
            told = holder
            time.sleep(POLL)
            continue
        except BaseException:
            os.close(handle)
            raise
        if _same_file(handle, path):
            break
        os.close(handle)  # its holder removed it between our two calls
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def _same_file(handle: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
