"""The tensors of a drafter in somebody else's folder, each held against the shape it must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dspark.draft.checkpoint import check_dtype, check_vocabulary, empty_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.folder import CONFIG_FILE, TensorFolder
from dspark.draft.vocabulary import MEMBERS, OFFSETS, vocabulary_ids, vocabulary_maps
from dspark.errors import UserError
from dspark.interop.names import COPIES
from dspark.interop.spec import Given


def own_tensors(
    stored: TensorFolder,
    theirs: Mapping[str, str],
    config: DraftConfig,
    made: Collection[str] = (),
) -> list[str]:
    """Our names of a drafter's tensors, all of which `stored` holds in the right shape.

    Args:
        stored: The folder.
        theirs: Our name -> its name there.
        config: What the drafter is.
        made: Tensors that need not be there.

    Raises:
        UserError: Missing, unexpected, misshapen or quantised tensors.
    """
    empty = empty_drafter(stored.folder, theirs, config)
    expected = {name: tensor for name, tensor in empty.state_dict().items() if name not in made}
    problems = {
        "missing": [name for name in expected if name not in theirs],
        "unexpected": [
            their for name, their in theirs.items() if name not in expected and name not in COPIES
        ],
    }
    if any(problems.values()):
        listed = [
            f"{kind} tensors: {', '.join(names)}" for kind, names in problems.items() if names
        ]
        raise UserError(f"{stored.folder}: {'; '.join(listed)}")
    for name, tensor in expected.items():
        entry = stored.entries[theirs[name]]
        if entry.shape != tuple(tensor.shape):
            raise UserError(
                f"{entry.path}: {theirs[name]} has shape {entry.shape}, expected "
                f"{tuple(tensor.shape)} by {CONFIG_FILE}"
            )
        check_dtype(entry.path, theirs[name], entry.dtype, tensor.dtype)
    return list(expected)


def read_tensors(
    stored: TensorFolder, theirs: Mapping[str, str], config: DraftConfig, given: Given
) -> dict[str, Tensor]:
    """The drafter's tensors by our names, as stored; maps of a reduced vocabulary are among them.

    Args:
        stored: The folder.
        theirs: Our name -> its name there.
        config: What the drafter is.
        given: Names the target, which knows what is padding.

    Raises:
        UserError: As `own_tensors`, and a reduced vocabulary without a map, or with a wrong one.
    """
    names, made = dict(theirs), {}
    if config.draft_vocab_size is None:  # an identity map says nothing
        names.pop(OFFSETS, None)
        names.pop(MEMBERS, None)
    elif OFFSETS in names and MEMBERS not in names:
        raise UserError(
            f"{stored.folder}: {OFFSETS} without {MEMBERS}: a reduced vocabulary has both"
        )
    elif OFFSETS not in names:
        made = _cut_padding(stored.folder, config, given)
    wanted = own_tensors(stored, names, config, made)
    held = stored.read(names[name] for name in wanted)
    tensors = {**{name: held[names[name]] for name in wanted}, **made}
    if OFFSETS in tensors:
        check_vocabulary(stored.folder, tensors)
    return tensors


def _cut_padding(folder: Path, config: DraftConfig, given: Given) -> dict[str, Tensor]:
    """The maps of a drafter that has all ids of the target and only no rows for its padding."""
    size = config.draft_vocab
    if given.target is None or size < min(given.target.vocab_sizes):
        raise UserError(
            f"{folder}: draft_vocab_size {size} of {config.vocab_size} but no {OFFSETS}: which ids "
            "of the target are they?"
        )
    offsets, members = vocabulary_maps(torch.arange(size), config.vocab_size)
    return {OFFSETS: offsets, MEMBERS: members}


def draft_ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Target ids [V'] of a reduced vocabulary; None: all."""
    return vocabulary_ids(tensors[OFFSETS]) if OFFSETS in tensors else None
