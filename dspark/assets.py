"""Where the shipped files are, and whether they are the ones we shipped.

`data/` at the top of a checkout goes into the wheel as `dspark/_assets/`. `asset("prompts")` is
the same file in both. `manifest.json` beside them lists size and SHA-256 of every file, since
every published number depends on the frozen nano target.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json

_PACKAGE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
# Text that explains the data may be edited without changing what any number depends on.
_UNHASHED_NAMES = frozenset({MANIFEST, "README.md"})


def assets_root() -> Path:
    """The folder of shipped files: `dspark/_assets` in a wheel, `data/` in a checkout."""
    packaged = _PACKAGE / "_assets"
    checkout = _PACKAGE.parent / "data"
    # A checkout is recognised by its project file: a folder `data` next to an installed package
    # (site-packages/data) belongs to somebody else.
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    if packaged.is_dir():
        return packaged
    raise UserError(f"{packaged}: shipped files not found; reinstall dspark")


def asset(name: str) -> Path:
    """Path of a shipped file or folder, such as `asset("k3-nano")`.

    Raises `UserError` that lists what there is if nothing of that name ships.
    """
    root = assets_root()
    path = root / name
    if not path.exists():
        known = ", ".join(sorted(entry.name for entry in root.iterdir()))
        raise UserError(f"{name}: no such shipped file; there are: {known}")
    return path


@dataclass(frozen=True)
class AssetReport:
    """What `verify` found; three tuples of relative names, all empty if the assets are intact."""

    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unlisted: tuple[str, ...]
    checked: int
    total_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every listed file is there with its listed content."""
        return not (self.missing or self.changed or self.unlisted)


def verify(root: Path | None = None) -> AssetReport:
    """Hash every shipped file and compare with the manifest (about 12 MB, well under a second)."""
    root = root or assets_root()
    listed = {entry["path"]: entry for entry in read_json(root / MANIFEST)["files"]}
    found = {name: root / name for name in _shipped_names(root)}
    missing = sorted(set(listed) - set(found))
    unlisted = sorted(set(found) - set(listed))
    changed = [
        name
        for name in sorted(set(found) & set(listed))
        if _describe(found[name]) != (listed[name]["bytes"], listed[name]["sha256"])
    ]
    total = sum(path.stat().st_size for path in found.values())
    return AssetReport(tuple(missing), tuple(changed), tuple(unlisted), len(listed), total)


def write_manifest(root: Path | None = None) -> Path:
    """Rewrite `manifest.json` for the files that are there now; returns its path."""
    root = root or assets_root()
    files = []
    for name in _shipped_names(root):
        size, digest = _describe(root / name)
        files.append({"path": name, "bytes": size, "sha256": digest})
    path = root / MANIFEST
    atomic_write_json(path, {"schema_version": 1, "files": files})
    return path


def _shipped_names(root: Path) -> list[str]:
    names = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not hidden and path.name not in _UNHASHED_NAMES:
            names.append(relative.as_posix())
    return sorted(names)


def _describe(path: Path) -> tuple[int, str]:
    return path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":  # `python -m dspark.assets` after a shipped file was rebuilt on purpose
    print(write_manifest())
