"""What Triton's interpreter does not mind and its compiler refuses: launches are translated for a
card that is not there, as far as types go; one of NVIDIA's, and of AMD's.

A helper with two returns of unlike integers ran in the interpreter and on no GPU, products in parts
of tf32 on none of AMD's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_kernels import kda

DRIVER = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("hip", "gfx942", 64) if sys.argv[1] == "amd" else GPUTarget("cuda", 90, 32)

class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: TARGET
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
"""

CHUNKS = """
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

AMD = """
torch.version.hip = "6.4"  # before the modules that ask for it
from dspark_kernels import (
    kda_decode_triton, kda_output_triton, mla_output_triton, moe_decode_triton, moe_grouped_triton)
from tests import test_kernel_kda_decode as decode, test_kernel_kda_output as output
from tests import test_kernel_kda_step as step, test_kernel_markov_sample as markov
from tests import test_kernel_markov_code as code, test_kernel_moe_decode as moe

for kept, upto in ((2, None), (2, step.branches(2, 3, 2, "cpu"))):
    step.step(*step.given(2, 3, 2, 64, 64, "cpu").args(), kept, upto=upto)
for grown in (False, True):
    call = decode.round_of()
    if grown:
        decode.grow(call)
    kda_decode_triton.kda_decode(*call.args())
given = output._given(1, 2, 64, 64, 1)
kda_output_triton.kda_output(**given, eps=1e-5, lower_bound=-5.0)
for kind in (torch.float32, torch.bfloat16):
    q, latents = torch.randn(1, 2, 4, 96).to(kind), torch.randn(1, 64, 96).to(kind)
    lengths, w_v = torch.full((1,), 9), torch.randn(4, 32, 64).to(kind)
    mla_output_triton.mla_output(q, latents, lengths, 64, w_v, None)
for packed in (False, True):
    layer = moe._random(64, 7, 2, 32, 48, latent=96, packed=packed)
    x, scale, residual = moe._rows(3, 64)
    moe_decode_triton.moe_decode(x, layer, norm=scale, eps=1e-5, residual=residual)
for packed, rows in ((False, 40), (False, 300), (True, 40)):
    layer = moe._random(64, 7, 2, 128, 48, latent=128, packed=packed)
    x, scale, residual = moe._rows(rows, 64)
    moe_grouped_triton.moe_decode(x, layer, norm=scale, eps=1e-5, residual=residual)
drawn = {**markov.block(2, 3, 200, 16), **markov.controls(2, *markov.SETTINGS)}
markov.kernel(**drawn)
for recurrent in (False, True):
    markov.kernel(**drawn, coder=code.coder_of(2, 3, 16, recurrent, torch.float32))
"""


def translated(script: str, *words: str, cache: Path) -> set[str]:
    """Names of the kernels that a script launches, translated in a process of its own."""
    here = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "DSPARK_OPS")}
    roots = str(Path(kda.__file__).parents[1]), str(Path(__file__).parents[1])
    path = os.pathsep.join((*roots, here.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER + script, *words],
        env={**here, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("form", "dtype"), [("rows", "float32"), ("packed", "float32"), ("packed", "bfloat16")]
)
def test_kda_chunk_and_its_gradients(form: str, dtype: str, tmp_path: Path) -> None:
    found = translated(CHUNKS, form, dtype, cache=tmp_path)
    within = "near_kernel" if dtype == "bfloat16" else "within_kernel"
    assert {within, "pass_kernel", "pass_back_kernel"} <= found


def test_decoding_for_a_card_of_amds(tmp_path: Path) -> None:
    """Its compiler knows fewer kinds of products, and none of the launches that begin early."""
    found = translated(AMD, "amd", cache=tmp_path)
    assert {"tree_kernel", "round_kernel", "_attend_kernel", "_output_kernel"} <= found
    assert {"_gated_kernel", "_rnn_kernel", "dense", "sort", "cut", "gate_up", "down"} <= found
