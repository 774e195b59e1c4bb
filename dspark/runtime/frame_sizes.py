"""How large the next verify slot is, from what earlier frames said.

    sizes            2, 4, 6, 8 primaries, as far as the draft goes, and the whole draft
    wish             what the policy would have verified of a draft, had the slot been the block
    size of a row    the smallest that holds the running mean of its wishes, to the nearest token
    size of a slot   the largest of its rows'

A row is cut at its own size even in a larger slot: what it says depends on nobody else. The wishes
of frame n - 1 are the newest that frame n + 1 uses, so the choice waits for nothing and cannot see
what it decides about. (Growing a slot while it runs would.)
"""

from __future__ import annotations

import math

SIZES = (2, 4, 6, 8)
MEMORY = 0.5
"""Weight of the past in the running mean of wishes."""


def slot_sizes(draft_length: int) -> tuple[int, ...]:
    """The sizes that a draft of so many tokens may need; (0,) for a frame that drafts nothing."""
    return (*(size for size in SIZES if size < draft_length), draft_length)


class Wish:
    """The running mean of what one row wanted to have verified; at first all of the draft."""

    def __init__(self) -> None:
        self._mean = math.inf

    def learn(self, wanted: int) -> None:
        known = self._mean < math.inf
        self._mean = MEMORY * self._mean + (1 - MEMORY) * wanted if known else float(wanted)

    def size(self, sizes: tuple[int, ...]) -> int:
        """The row's slot among `sizes`."""
        return next((size for size in sizes if size + 0.5 >= self._mean), sizes[-1])
