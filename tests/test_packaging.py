"""What is installed is exactly what should be, and shadows nobody.

Hugging Face ships a package named `kernels` that transformers imports. Were our folder `kernels/` a
package, `from transformers import ...` would break for anyone who starts Python in the checkout.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dspark
from dspark import assets
from dspark.errors import UserError

REPO = Path(__file__).resolve().parent.parent
OURS = {"dspark", "dspark_eval", "dspark_kernels"}


@pytest.mark.parametrize("folder", ["kernels", "eval", "data", "tests", "notebooks"])
def test_source_roots_are_not_packages(folder: str) -> None:
    assert not (REPO / folder / "__init__.py").exists()


def test_nobody_finds_our_kernels_folder_as_a_package() -> None:
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is not None:
        assert not Path(spec.origin).resolve().is_relative_to(REPO)


def test_transformers_imports_from_the_checkout() -> None:
    code = "from transformers import Qwen3ForCausalLM; print(Qwen3ForCausalLM.__name__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "Qwen3ForCausalLM", result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(REPO)).build(directory=str(folder), versions=["standard"])))


def test_wheel_holds_three_packages_and_the_assets(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == OURS | {f"dspark-{dspark.__version__}.dist-info"}
    assert {f"{package}/py.typed" for package in OURS} <= set(names)
    assert {f"dspark_eval/reporting/page.{kind}" for kind in ("css", "html.jinja")} <= set(names)
    shipped = {name.removeprefix("dspark/_assets/") for name in names if "/_assets/" in name}
    listed = {entry["path"] for entry in assets.read_json(REPO / "data/manifest.json")["files"]}
    assert listed <= shipped
    assert not [name for name in names if "__pycache__" in name or name.endswith(".tmp")]


def test_wheel_finds_its_assets_and_its_command(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import dspark, dspark.assets as a, dspark_eval, dspark_kernels;"
        "r = a.verify(); print(r.ok, a.asset('manifest.json').parent.name, dspark.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "_assets", str(tmp_path / "dspark/__init__.py")]
    entry = (tmp_path / f"dspark-{dspark.__version__}.dist-info/entry_points.txt").read_text()
    assert "dspark = dspark.cli:main" in entry


def test_shipped_files_are_intact_and_small() -> None:
    report = assets.verify()
    assert report.ok, f"{report}; after an intended change: python -m dspark.assets"
    assert report.total_bytes <= 12e6


def test_verify_names_what_is_wrong(tmp_path: Path) -> None:
    for name in ("same", "edited", "gone"):
        (tmp_path / name).write_text(name)
    assets.write_manifest(tmp_path)
    assert assets.verify(tmp_path).ok
    (tmp_path / "edited").write_text("detide")  # same size
    (tmp_path / "gone").unlink()
    (tmp_path / "extra").write_text("extra")
    report = assets.verify(tmp_path)
    assert not report.ok
    assert (report.missing, report.changed, report.unlisted) == (("gone",), ("edited",), ("extra",))


def test_unknown_asset_lists_what_there_is() -> None:
    with pytest.raises(UserError, match=r"manifest\.json"):
        assets.asset("k3-nanoo")


def test_version_is_one_number() -> None:
    pyproject = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in pyproject
    assert dspark.__version__.count(".") == 2
