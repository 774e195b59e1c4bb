"""K3 checkpoints on disk, in exactly the published layout, in and out.

    language_model.model.layers.N.self_attn.q_proj.weight                              bfloat16
    language_model.model.layers.N.self_attn.A_log                                      float32
    language_model.model.layers.N.block_sparse_moe.experts.E.w1.weight_packed, _scale  uint8

Reading makes the model without storage, allocates each parameter once in its final dtype and fills
it from one stored tensor at a time, so memory stays near the size of the model. Only files that
hold a wanted tensor are opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.k3 import layout
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.mxfp4 import GROUP, dequantise, quantise
from dspark.k3.shards import INDEX_FILE, Piece, ShardReader, write_shards

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LoadReport:
    """What a load read: names skipped on purpose, files opened, bytes of tensors read."""

    skipped: tuple[str, ...]
    shards_opened: tuple[str, ...]
    bytes_read: int


def save_k3(
    folder: Path | str,
    model: K3ForCausalLM,
    *,
    shard_bytes: int = 5_000_000_000,
    experts: Literal["mxfp4", "plain"] = "mxfp4",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``model`` in the published layout: shards, index and config.json.

    experts: pack the routed experts as MXFP4 (which rounds them), or write them as ``dtype``.
    dtype: of everything that is neither packed nor always float32.
    config.json is written last, so a folder left by a crash is not mistaken for a checkpoint.

    Raises:
        UserError: the folder already holds weights; an expert's width is no multiple of 32.
    """
    if experts not in ("mxfp4", "plain"):
        raise UserError(f"experts is {experts!r}; expected mxfp4 or plain")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).exists():
        raise UserError(f"{folder}: already holds weights; choose an empty folder")
    packed = experts == "mxfp4" and model.config.num_experts > 0
    config = replace(model.config, expert_quantization="mxfp4" if packed else None)
    write_shards(folder, list(_pieces(model, packed, dtype)), shard_bytes)
    atomic_write_json(folder / "config.json", config.to_dict() | {"dtype": _spell(dtype)})


def load_k3(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> K3ForCausalLM:
    """Read a checkpoint folder of ``kimi_k3`` or ``kimi_linear``; see `load_k3_with_report`."""
    return load_k3_with_report(folder, dtype=dtype, device=device)[0]


def load_k3_with_report(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[K3ForCausalLM, LoadReport]:
    """Read a checkpoint folder into a new model.

    Whether an expert is packed is read off the names. The vision tower is skipped and reported.

    Raises:
        UserError: anything wrong with the folder, or with the names, shapes or dtypes in it.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    reader = ShardReader(folder)
    vision = sorted(n for n in reader.files if layout.bare(n).startswith(layout.VISION_PREFIXES))
    text = sorted(reader.files.keys() - set(vision))
    wanted = {layout.bare(name): name for name in text}
    if len(wanted) < len(text):
        raise UserError(f"{folder}: a tensor is stored both with and without {layout.TEXT_PREFIX}")

    with torch.device("meta"):
        model = K3ForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    if config.tie_word_embeddings and _HEAD not in wanted:
        del shapes[_HEAD]
    problem = layout.misfit(shapes, wanted)
    if problem:
        raise UserError(f"{folder}: tensor names do not fit config.json: {problem}")

    parameters = {
        name: torch.empty(
            shape, dtype=torch.float32 if layout.is_float32(name) else dtype, device=device
        )
        for name, shape in shapes.items()
    }
    _fill(parameters, reader.read(list(wanted.values())))
    if config.tie_word_embeddings:
        _tie(folder, parameters)
    model.load_state_dict(parameters, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model, LoadReport(tuple(vision), tuple(reader.opened), reader.bytes_read)


def _pieces(model: K3ForCausalLM, packed: bool, dtype: torch.dtype) -> Iterator[Piece]:
    """Everything the model stores, in its own order, as tensors still to be made."""
    config = model.config
    prefix = layout.TEXT_PREFIX if config.model_type == "kimi_k3" else ""
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == _HEAD:
            continue
        stems = layout.expert_stems(name, tensor.shape[0])
        if stems and packed:
            yield from (_packed(prefix + s, w) for s, w in zip(stems, tensor, strict=True))
        elif stems:
            yield from (_plain(prefix + s, w, dtype) for s, w in zip(stems, tensor, strict=True))
        elif name.endswith(".A_log"):
            yield _plain(prefix + name, layout.a_log_to_disk(tensor, config), torch.float32)
        else:
            yield _plain(prefix + name, tensor, torch.float32 if layout.is_float32(name) else dtype)


def _plain(name: str, tensor: Tensor, dtype: torch.dtype) -> Piece:
    def make() -> dict[str, Tensor]:
        # A copy: safetensors refuses tensors that share memory with other parts of the model.
        return {name: tensor.detach().to("cpu", dtype, copy=True)}

    return Piece(tensor.numel() * dtype.itemsize, make)


def _packed(stem: str, weight: Tensor) -> Piece:
    if weight.shape[-1] % GROUP:
        raise UserError(
            f"{stem}: MXFP4 needs input widths that are multiples of {GROUP}, got "
            f'{weight.shape[-1]}; write it with experts="plain"'
        )

    def make() -> dict[str, Tensor]:
        codes, scale = quantise(weight)
        return {stem + layout.PACKED: codes.cpu(), stem + layout.SCALE: scale.cpu()}

    return Piece(weight.numel() // 2 + weight.numel() // GROUP, make)


def _fill(parameters: Mapping[str, Tensor], stored: Iterator[tuple[str, Tensor]]) -> None:
    """Copy each stored tensor to its place; the two halves of a packed one wait for each other."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, value in stored:
        stem, kind = layout.split_packed(layout.bare(name))
        parameter, row = layout.place_of(stem)
        place = parameters[parameter] if row is None else parameters[parameter][row]
        if not kind:
            place.copy_(_plain_value(name, value, place))
            continue
        width = place.shape[-1] // (2 if kind == layout.PACKED else GROUP)
        _check(name, value, (*place.shape[:-1], width), (torch.uint8,))
        pair = halves.setdefault(stem, {})
        pair[kind] = value.clone()  # its file may be closed before the other half comes
        if len(pair) == 2:
            place.copy_(_unpacked(stem, halves.pop(stem), place.dtype))


def _plain_value(name: str, value: Tensor, place: Tensor) -> Tensor:
    shape: Sequence[int] = place.shape
    if name.endswith(".A_log"):
        a_log = layout.a_log_from_disk(value, place.numel())
        value = value if a_log is None else a_log
    _check(name, value, shape, _FLOATS)
    return value


def _unpacked(stem: str, pair: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    weight = dequantise(pair[layout.PACKED], pair[layout.SCALE], dtype)
    if not torch.isfinite(weight).all():
        raise UserError(f"{stem}{layout.SCALE}: a scale is NaN or too large for {_spell(dtype)}")
    return weight


def _check(name: str, value: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise UserError(
            f"{name}: shape {list(value.shape)} does not fit config.json, expected {list(shape)}"
        )
    if value.dtype not in dtypes:
        wanted = " or ".join(map(_spell, dtypes))
        raise UserError(f"{name}: stored as {_spell(value.dtype)}, expected {wanted}")


def _tie(folder: Path, parameters: dict[str, Tensor]) -> None:
    """Embedding and head become one tensor; a head that is stored all the same must agree."""
    embedding = parameters[_EMBEDDING]
    if not torch.equal(parameters.get(_HEAD, embedding), embedding):
        raise UserError(
            f"{folder}: config.json ties the word embeddings but {_HEAD} differs from "
            f"{_EMBEDDING}; set tie_word_embeddings to false"
        )
    parameters[_HEAD] = embedding


def _read_config(path: Path) -> K3Config:
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object")
    try:
        return K3Config.from_dict(config)
    except UserError as error:
        raise UserError(f"{path.parent}/{error}") from None


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
