"""What a seed may be, the same in every command: 0 to 2^63 - 1.

It is what a generator of torch takes and an int64 tensor holds.
"""

from __future__ import annotations

import argparse

from dspark.errors import UserError

LARGEST_SEED = 2**63 - 1


def check_seed(name: str, seed: int) -> None:
    """UserError, naming the option or setting `name`, for a number that is no seed."""
    if seed < 0:
        raise UserError(f"{name}: expected 0 or more; got {seed}")
    if seed > LARGEST_SEED:
        raise UserError(f"{name}: expected at most {LARGEST_SEED} (2^63 - 1); got {seed}")


def seed_argument(text: str) -> int:
    """`type` of an argparse option that is a seed; argparse names the option in what it says."""
    try:
        seed = int(text)
    except ValueError:  # no number, or thousands of digits
        raise argparse.ArgumentTypeError("expected a whole number") from None
    if not 0 <= seed <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected 0 to {LARGEST_SEED} (2^63 - 1); got {seed}")
    return seed
