"""Numbers of a command line held against the target and the drafter that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dspark.errors import UserError
from dspark.runtime.target import Target


def check_max_new_tokens(asked: int, target: Target) -> None:
    """Refuse answers that the target has no positions for, before a cache of them is allocated."""
    if asked > target.max_positions:
        raise UserError(
            f"--max-new-tokens {asked}: target {target.name} reads {target.max_positions} tokens; "
            "expected at most so many"
        )


def check_draft_length(asked: int | None, block_size: int) -> int:
    """The draft length to run: the block size unless asked for; a longer one is refused.

    Beyond the trained block acceptance collapses at every position, the early ones too.
    """
    length = block_size if asked is None else asked
    if not 1 <= length <= block_size:
        raise UserError(
            f"--draft-length {length}: this drafter was trained with block size {block_size}; "
            f"expected 1..{block_size}"
        )
    return length


@contextmanager
def room_for(max_new_tokens: int, advice: str) -> Iterator[None]:
    """Memory that is not there for so long a text: one line with ``advice``."""
    try:
        yield
    except (RuntimeError, TypeError) as error:  # TypeError: beyond 64 bits
        if not _beyond_memory(error):
            raise
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: not enough memory for so long a text; {advice}"
        ) from error


def _beyond_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there; torch has a type for it on a GPU alone."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        part in words for part in ("can't allocate memory", "storage size", "when unpacking")
    )
