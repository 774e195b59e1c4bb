"""What Triton's interpreter does not mind and its compiler refuses: launches are translated for a
card that is not there, as far as types go.

A helper with two returns of unlike integers ran in the interpreter and on no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_kernels import kda

TRANSLATE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_active_torch_device = lambda self: torch.device("cpu")
    get_device_interface = lambda self: torch.cuda

class Translated(Exception): pass

make_ir = ASTSource.make_ir
def stop(self, *args, **more):
    make_ir(self, *args, **more)
    raise Translated

def launch(self, grid):
    def call(*args, **more):
        try:
            JITFunction.run(self, *args, grid=grid, warmup=True, **more)
        except Translated:
            print(self.__name__)
    return call

driver.set_active(Driver())
ASTSource.make_ir = stop
JITFunction.__getitem__ = launch
from dspark_kernels.kda_chunk_triton import chunk
from dspark_kernels.kda_states_triton import states_at

packed, kind = sys.argv[1] == "packed", getattr(torch, sys.argv[2])
T, H, K, S = 300, 2, 64, 3 if packed else 1
bounds = torch.tensor([0, 100, 164, 300]) if packed else None
rows = [torch.randn(1, T, H, K, dtype=kind, requires_grad=True) for _ in range(3)]
g = torch.rand(1, T, H, K).neg().requires_grad_()
beta = torch.rand(1, T, H, requires_grad=True)
state = torch.randn(S, H, K, K, requires_grad=True)
out, last = chunk(*rows, g, beta, state, -5.0, bounds)
(out.float().sum() + last.sum()).backward()
where = torch.tensor([[0, 64, 299]])
states_at(*rows[1:], g, beta, state[:1], where, -5.0).sum().backward()
"""


@pytest.mark.parametrize(
    ("form", "dtype"), [("rows", "float32"), ("packed", "float32"), ("packed", "bfloat16")]
)
def test_kda_chunk_and_its_gradients(form: str, dtype: str, tmp_path: Path) -> None:
    here = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "DSPARK_OPS")}
    path = os.pathsep.join((str(Path(kda.__file__).parents[1]), here.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", TRANSLATE, form, dtype],
        env={**here, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    within = "near_kernel" if dtype == "bfloat16" else "within_kernel"
    assert {within, "pass_kernel", "pass_back_kernel"} <= set(done.stdout.split())
