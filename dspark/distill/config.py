"""Every knob of a distillation run, checked once, saved beside what it made.

A run is described by one frozen `DistillConfig` of seven sections. It is read from YAML, changed by
dotted overrides (`{"train.lr": 5e-4}`), and written back in full as `run.yaml`. Nothing else steers
a run, so the file is enough to repeat it. Unknown keys are errors: an option that is silently
ignored is worse than none.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from dspark.distill.presets import preset_overrides
from dspark.distill.settings import (
    CacheSettings,
    DataSettings,
    DrafterSettings,
    EvalSettings,
    OutSettings,
    TargetSettings,
)
from dspark.distill.train_settings import TrainSettings
from dspark.errors import UserError


@dataclass(frozen=True)
class DistillConfig:
    """A whole run. Raises UserError when a value, or two together, cannot work."""

    target: TargetSettings = field(default_factory=TargetSettings)
    data: DataSettings = field(default_factory=DataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    out: OutSettings = field(default_factory=OutSettings)

    def __post_init__(self) -> None:
        if self.eval.draft_length > self.drafter.block_size:
            raise UserError(
                f"eval.draft_length is {self.eval.draft_length}: expected at most "
                f"drafter.block_size, {self.drafter.block_size}"
            )

    @property
    def data_seed(self) -> int:
        """What decides answers and held-out rows."""
        return self.train.seed if self.data.seed is None else self.data.seed

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dict of JSON and YAML values, in the order of the fields."""
        return {
            section.name: {
                option.name: _plain(getattr(getattr(self, section.name), option.name))
                for option in dataclasses.fields(getattr(self, section.name))
            }
            for section in dataclasses.fields(self)
        }

    def to_yaml(self) -> str:
        """The whole configuration as YAML, each key with its description."""
        lines: list[str] = []
        for section in dataclasses.fields(self):
            settings = getattr(self, section.name)
            lines.append(f"{section.name}:")
            for entry in dataclasses.fields(settings):
                value = _yaml_value(_plain(getattr(settings, entry.name)))
                lines.append(f"  {entry.name}: {value}  # {entry.metadata['doc']}")
        return "\n".join(lines) + "\n"


SECTIONS: dict[str, type] = {
    "target": TargetSettings, "data": DataSettings, "drafter": DrafterSettings,
    "cache": CacheSettings, "train": TrainSettings, "eval": EvalSettings, "out": OutSettings,
}  # fmt: skip


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> DistillConfig:
    """Read a configuration: defaults, then the preset, the YAML file and the overrides.

    `overrides` maps dotted keys ("train.lr") to values; None is YAML's null. Raises UserError
    naming file, line and key, or a preset that does not exist.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    where: dict[str, str] = {}
    if path is not None:
        _read_yaml(Path(path), values, where)
    if preset is not None:
        recipe = _undotted(preset_overrides(preset))
        values = {name: recipe[name] | given for name, given in values.items()}
    for section, given in _undotted(overrides or {}).items():
        values[section] |= given
        if given:
            where.pop(section, None)
    built = {name: _build(SECTIONS[name], values[name], where.get(name, "")) for name in SECTIONS}
    return _build(DistillConfig, built, f"{path}: " if path is not None else "")


def _undotted(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"train.lr": 1e-3} as {"train": {"lr": 1e-3}}, every section there, every value coerced."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for dotted, value in settings.items():
        section, _, key = dotted.partition(".")
        _expect_known(section, SECTIONS, "", "")
        _expect_known(key, _field_names(section), f"{section}.", "")
        values[section][key] = _coerce(section, key, value, "")
    return values


def config_from_dict(values: Mapping[str, Mapping[str, Any]]) -> DistillConfig:
    """The inverse of `DistillConfig.to_dict`."""
    sections = {
        name: SECTIONS[name](**{k: _coerce(name, k, v, "") for k, v in values[name].items()})
        for name in SECTIONS
    }
    return DistillConfig(**sections)


def _build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _read_yaml(path: Path, values: dict[str, dict[str, Any]], where: dict[str, str]) -> None:
    """Fill `values` and `where` (section -> "file: ") from a file, with line numbers in errors."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML ({error.problem})") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path}: not text in UTF-8 that YAML allows; save it as UTF-8") from None
    if root is None:
        return
    for section, node, line in _entries(root, path):
        _expect_known(section, SECTIONS, "", f"{path}:{line}: ")
        where[section] = f"{path}: "
        for key, value_node, key_line in _entries(node, path):
            at = f"{path}:{key_line}: "
            _expect_known(key, _field_names(section), f"{section}.", at)
            if key in values[section]:
                raise UserError(f"{at}{section}.{key} is given twice; keep one")
            try:
                value = yaml.SafeLoader("").construct_document(value_node)
            except (yaml.YAMLError, ValueError):  # a foreign tag, an impossible date
                what = f"{at}{section}.{key}: a value that YAML cannot read; quote it"
                raise UserError(what) from None
            values[section][key] = _coerce(section, key, value, at)


def _entries(node: yaml.Node, path: Path) -> list[tuple[str, yaml.Node, int]]:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{line}: expected `key: value` lines")
    return [(str(k.value), v, k.start_mark.line + 1) for k, v in node.value]


def _field_names(section: str) -> list[str]:
    return [entry.name for entry in dataclasses.fields(SECTIONS[section])]


def _expect_known(name: str, known: Any, prefix: str, where: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
    raise UserError(f"{where}unknown key {prefix}{name}; {hint}")


def _coerce(section: str, key: str, value: Any, where: str) -> Any:
    """Bring a YAML value to the field's type, or say what was expected."""
    hint = get_type_hints(SECTIONS[section])[key]
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    try:
        if get_origin(hint) is tuple:
            items = value if isinstance(value, (list, tuple)) else [value]
            return tuple(_scalar(get_args(hint)[0], item) for item in items)
        if get_origin(hint) is Literal:
            return _choice(get_args(hint), value)
        return _scalar(hint, value)
    except (TypeError, ValueError):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        name = ", ".join(choices) or str(hint).replace("<class '", "").replace("'>", "")
        either = f"{name} or null" if optional else name
        raise UserError(f"{where}{section}.{key} is {value!r}: expected {either}") from None


def _choice(choices: tuple[str, ...], value: Any) -> str:
    """One of `choices`; YAML 1.1 reads a bare on or off as a truth value."""
    if isinstance(value, bool):
        value = "on" if value else "off"
    if value not in choices:
        raise ValueError
    return str(value)


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and not isinstance(value, bool):
        return float(value)  # also "1e-3", which YAML 1.1 reads as text
    if kind is str and (isinstance(value, Path) or type(value) is int):
        return str(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _yaml_value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
