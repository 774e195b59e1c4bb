"""`dspark inspect`: what a drafter is, what a draft step costs, and what it should be worth.

Only the configuration and the headers of the weights are read, in any layout that `dspark import`
knows; a folder with a `config.json` alone will do. Bytes are those of `dspark.draft.cost`, speed-up
is that of `dspark.draft.speedup`, from measured step times, or else from bytes:

    t(1) ~ bytes of a plain step of the target
    t(1 + g) ~ bytes of its pass over 1 + g rows + bytes of a draft step

At batch 1 that is a fair guess on an accelerator, and it is called one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.draft.calibration import Calibration
from dspark.draft.checkpoint import empty_drafter, read_calibration
from dspark.draft.config import DraftConfig
from dspark.draft.cost import context_bytes, parameters, weight_bytes
from dspark.draft.folder import CONFIG_FILE, TensorFolder
from dspark.draft.speedup import Prediction, best, predict
from dspark.draft.vocabulary import MEMBERS, OFFSETS
from dspark.errors import UserError
from dspark.files import read_json
from dspark.inspection_inputs import Acceptance
from dspark.interop.opening import Opened, open_drafter
from dspark.interop.tensors import own_tensors
from dspark.k3.config import K3Config
from dspark.k3.cost import PassBytes, pass_bytes
from dspark.runtime.loading import K3_KINDS, target_folder
from dspark.wording import counted

CONTEXTS = (4_096, 131_072, 1_048_576)
_LAYER = re.compile(r"^layers\.\d+\.")


@dataclass(frozen=True)
class Group:
    """Tensors that differ in their layer alone."""

    name: str
    count: int
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class Inspection:
    """What is known of a drafter. Sizes are bytes, of weights and context in `dtype`.

    step: weights that a draft step reads, by part, and in all
    context: tokens -> bytes that it reads of them; context_per_token is what one more adds (kda: 0)
    target_step: bytes of a plain step of the target by part, at the shortest context
    predictions: where acceptance was measured -> one entry for each draft length
    times_from: what the predictions' step times are
    """

    folder: str
    layout: str
    recognised: str | None
    undecided: tuple[str, ...]
    dtype: str
    config: dict[str, Any]
    parameters: int
    groups: tuple[Group, ...]
    step: dict[str, int]
    context_per_token: int
    context: dict[int, int]
    calibration: tuple[str, ...]
    target_step: dict[str, float] | None
    acceptance: Acceptance
    times_from: str | None
    predictions: dict[str, list[Prediction]]

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        best_of = {name: best(found) for name, found in self.predictions.items()}
        chosen = {name: found and asdict(found) for name, found in best_of.items()}
        return {"schema_version": 1, **asdict(self), "best": chosen}


def inspect_drafter(
    folder: Path,
    *,
    contexts: Sequence[int] = (),
    target: str | None = None,
    acceptance: Acceptance | None = None,
    times: Mapping[int, float] | None = None,
    bandwidth: float | None = None,
) -> Inspection:
    """Look at a drafter.

    Args:
        folder: Of any layout, with or without weights.
        contexts: Tokens of context to count bytes at, beside `CONTEXTS`.
        target: `nano` or the folder of a target, whose config.json is read: sizes must agree.
        acceptance: C_1, C_2, ... by where it was measured.
        times: Measured seconds of a step by its rows.
        bandwidth: Bytes a second, to make seconds of bytes where no times were measured.

    Raises:
        UserError: Not a drafter, weights that do not fit it, or another target's drafter.
    """
    opened = open_drafter(folder, assume=True)
    config, dtype = opened.config, opened.dtype
    if opened.stored is not None:
        _check_tensors(opened.stored, opened.theirs, config)
    groups = _groups(opened)  # first: it refuses sizes that no tensor can have
    weights = weight_bytes(config, dtype)
    lengths = sorted({*CONTEXTS, *contexts})
    context = {length: context_bytes(config, length, dtype) for length in lengths}
    decoder = None if target is None else _target_config(target, opened)
    cost = None if decoder is None else pass_bytes(decoder, 1, lengths[0], dtype)
    times_from, used = None, times
    if times is not None:
        times_from = "measured step times"
    elif decoder is not None:
        drafts = weights.total + context[lengths[0]]
        used = _byte_times(decoder, config, lengths[0], dtype, drafts, bandwidth)
        times_from = f"bytes, at {lengths[0]} tokens of context"
        times_from += "" if bandwidth is None else f" and {bandwidth / 1e9:g} GB/s"
    chances = acceptance or {}
    seconds = times is not None or bandwidth is not None
    calibration = read_calibration(folder, config)
    return Inspection(
        folder=str(folder),
        layout=opened.title,
        recognised=opened.recognised,
        undecided=opened.undecided,
        dtype=str(dtype).removeprefix("torch."),
        config=_summary(config, opened.undecided),
        parameters=parameters(config),
        groups=groups,
        step={**asdict(weights), "total": weights.total},
        context_per_token=context_bytes(config, 2, dtype) - context_bytes(config, 1, dtype),
        context=context,
        calibration=_calibrated(calibration),
        target_step=None if cost is None else {**asdict(cost), "total": cost.total},
        acceptance=dict(chances),
        times_from=times_from if chances else None,
        predictions={
            name: predict(chance, used, seconds=seconds) for name, chance in chances.items()
        }
        if used
        else {},
    )


def _check_tensors(stored: TensorFolder, theirs: Mapping[str, str], config: DraftConfig) -> None:
    """Raises UserError unless the weights fit; maps of a vocabulary may be missing, or identity."""
    maps = (OFFSETS, MEMBERS)
    reduced = config.draft_vocab_size is not None
    names = {name: their for name, their in theirs.items() if reduced or name not in maps}
    own_tensors(stored, names, config, made=[name for name in maps if name not in names])


def _summary(config: DraftConfig, undecided: Sequence[str]) -> dict[str, Any]:
    """What decides between a drafter that works and one that only runs; open keys are None."""
    mine: dict[str, Any] = {
        "backbone": config.backbone,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "target_tap_kind": config.target_tap_kind,
        "layer_id_origin": config.layer_id_origin,
        "sample_from_anchor": config.sample_from_anchor,
        "block_size": config.block_size,
        "block_causal": config.block_causal,
        "mask_token_id": config.mask_token_id,
        "rope_theta": config.rope_theta,
        "yarn": None if config.yarn is None else asdict(config.yarn),
        "sliding_window": config.sliding_window,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab,
        "target": None if config.target is None else asdict(config.target),
    }
    return {key: None if key in undecided else value for key, value in mine.items()}


def _groups(opened: Opened) -> tuple[Group, ...]:
    """Parameters by name, those of all layers together, in the order of the model."""
    names = opened.theirs or ["layers.0.", f"layers.{opened.config.num_layers - 1}."]
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, tensor in empty_drafter(opened.folder, names, opened.config).named_parameters():
        key = (_LAYER.sub("layers.*.", name), tuple(tensor.shape))
        found[key] = found.get(key, 0) + 1
    return tuple(
        Group(name, count, shape, count * torch.Size(shape).numel())
        for (name, shape), count in found.items()
    )


def _calibrated(calibration: Calibration | None) -> tuple[str, ...]:
    """A sentence for each sampling setting that was fitted."""
    if calibration is None or not calibration.settings:
        return ()
    return tuple(
        f"{entry.setting}: {counted(entry.rounds, 'round')}, ECE {_mean(entry.ece_before)} before "
        f"and {_mean(entry.ece_after)} after (a perfect forecast: {_mean(entry.ece_floor)})"
        + (f"; {entry.sparse}" if entry.sparse else "")
        for entry in calibration.settings
    )


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.2f} %" if known else "not measured"


def _target_config(name: str, opened: Opened) -> K3Config:
    """The target's configuration, which must be one that the drafter fits."""
    home = target_folder(name)
    raw = read_json(home / CONFIG_FILE)
    if not isinstance(raw, dict):
        raise UserError(f"{home / CONFIG_FILE}: a JSON object was expected")
    if raw.get("model_type") not in K3_KINDS:
        raise UserError(
            f"--target {name}: a step is counted for {' and '.join(K3_KINDS)} only, not for "
            f"{raw.get('model_type')}; leave --target out"
        )
    decoder, config = K3Config.from_dict(raw), opened.config
    for key, found, wanted in (
        ("hidden_size", config.hidden_size, decoder.hidden_size),
        ("num_target_layers", config.num_target_layers, decoder.num_hidden_layers),
    ):
        if found != wanted and key not in opened.undecided:
            raise UserError(
                f"{opened.folder / CONFIG_FILE}: {key} is {found}, the target {name} has {wanted}; "
                "a drafter only works with the target it was distilled from"
            )
    return decoder


def _byte_times(
    decoder: K3Config,
    config: DraftConfig,
    context: int,
    dtype: torch.dtype,
    drafts: int,
    bandwidth: float | None,
) -> dict[int, float]:
    """Rows -> bytes, or seconds where the bandwidth is known."""
    passes: dict[int, PassBytes] = {
        rows: pass_bytes(decoder, rows, context, dtype) for rows in range(1, config.block_size + 2)
    }
    return {
        rows: (cost.total + (drafts if rows > 1 else 0)) / (bandwidth or 1.0)
        for rows, cost in passes.items()
    }
