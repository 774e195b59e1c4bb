"""Independent implementations that our code is compared with.

They pin versions of torch and transformers that differ from ours, so they are installed without
their dependencies (`make oracles`, `requirements/oracles.txt`) and only their model code is
imported. A missing oracle skips on a developer's machine and fails where `CI` is set: a skipped
oracle proves nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """Import module `name` (dotted is fine), or skip; fail under CI.

    `require("nemo_automodel.components.models.kimi_k3.model").KimiK3ForCausalLM`
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _absent(name, error)
        raise AssertionError from error


@cache
def fla_naive() -> ModuleType:
    """`fla/ops/kda/naive.py` of fla-core: the token-by-token KDA recurrence in plain torch.

    Loaded by path, because importing the package `fla` needs triton.
    """
    return _by_path("fla", "ops/kda/naive.py")


def _by_path(package: str, relative: str) -> ModuleType:
    found = importlib.util.find_spec(package)  # finds the folder without running its __init__
    folders = list(found.submodule_search_locations or []) if found else []
    for folder in folders:
        path = Path(folder) / relative
        if path.is_file():
            spec = importlib.util.spec_from_file_location(f"_oracle_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    _absent(f"{package}/{relative}", FileNotFoundError(relative))
    raise AssertionError


def _absent(name: str, error: Exception) -> None:
    message = f"oracle {name} cannot be imported ({error}); run `make oracles`"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
