"""KDA rows as blocks on matrix units, without a GPU: what the kernels compute.

Numbers by `gluon_on_numpy`, whose products see tf32 factors as a GPU's do: 2e-6 of the largest
element against float64. On the GPU the kernels run in test_kernel_kda_step and _decode.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from torch import Tensor

from dspark_kernels import kda, kda_blocks, kda_decode
from tests.gluon_on_numpy import launch, on_numpy
from tests.tolerance import assert_close

LIMIT = 2e-6
BOUND = -5.0


def plain(name: str) -> tuple[ModuleType, list[int]]:
    parts = (
        "kda_block_places", "kda_block_state_gluon", "kda_block_gluon", f"kda_{name}_block_gluon"
    )  # fmt: skip
    return on_numpy(*(importlib.import_module(f"dspark_kernels.{x}") for x in parts))


def strides(*rows: Tensor) -> list[int]:
    return [s for x in rows for s in x.stride()[:2]]


@pytest.mark.parametrize(
    ("B", "T", "H", "K", "V", "keep", "warps"),
    [(1, 8, 2, 128, 128, 8, 8), (2, 5, 2, 64, 64, 3, 4), (1, 8, 1, 64, 128, 8, 4),
     (1, 2, 1, 128, 128, 0, 4)],
)  # fmt: skip
@pytest.mark.parametrize("strongest", [False, True])
def test_step(
    B: int, T: int, H: int, K: int, V: int, keep: int, warps: int, strongest: bool
) -> None:
    """Keys that lie close to each other, gates in the middle and all at the bound."""
    q, k, a = (torch.randn(B, T, H, K) for _ in range(3))
    k = (k + k[:, :1]) / 2
    a += 30.0 * strongest
    v, b = torch.randn(B, T, H, V), torch.randn(B, T, H)
    A, dt, state = torch.rand(H), torch.randn(H * K), torch.randn(B, H, K, V)
    out, end = torch.full((B, T, H, V), torch.nan), torch.full_like(state, torch.nan)
    module, place = plain("step")
    launch(
        module.step_block_kernel, place, V // (16 * warps) * B * H,
        q, k, v, a, b, state, out, end, A, dt, K**-0.5, BOUND, keep, *strides(q, k, v, a, b),
        T=T, H=H, K=K, V=V, WARPS=warps, WRITE=keep > 0, COPIED=warps == 4, EARLY=False,
    )  # fmt: skip
    g = kda_decode.log_decay(a.double().flatten(2), A.double(), dt.double(), BOUND)
    unit_q, unit_k = kda_decode.unit(q.double()) * K**-0.5, kda_decode.unit(k.double())
    expected, new = kda.step(
        unit_q, unit_k, v.double(), g, b.double().sigmoid(), state.double(), keep
    )
    assert_close(out, expected, limit=LIMIT)
    if keep:
        assert_close(end, new, limit=LIMIT)
    else:
        assert end.isnan().all()


@pytest.mark.parametrize(
    ("T", "R", "K", "V", "fold", "accepted"),
    [(8, 8, 128, 128, False, [7]), (5, 6, 64, 64, False, [0, 3, 6]), (8, 0, 64, 64, True, [0]),
     (2, 2, 128, 64, False, [2, 0])],
)  # fmt: skip
def test_round(T: int, R: int, K: int, V: int, fold: bool, accepted: list[int]) -> None:
    """Outputs, the state behind the accepted rows, window and slots; other slots hold NaN."""
    B, H, W = len(accepted), 2, 4
    C = H * (2 * K + V)
    held = torch.randn(B, W - 1 + R, C), torch.randn(B, R, H * K), torch.randn(B, R, H)
    for i, n in enumerate(accepted):
        for x, before in zip(held, (W - 1, 0, 0), strict=True):
            x[i, before + n :] = torch.nan
    rows = torch.randn(B, T, C), torch.randn(B, T, H * K), torch.randn(B, T, H)
    given = [
        *rows, torch.randn(B, T, H * V), *held, torch.tensor(accepted), torch.randn(B, H, K, V),
        torch.randn(W, C), torch.rand(H), torch.randn(H * K), torch.rand(V) + 0.5,
    ]  # fmt: skip
    wide = [x.double() if x.is_floating_point() else x.clone() for x in given]
    reference: Callable[..., Tensor] = kda_decode.kda_decode
    expected = reference(*wide, 1e-5, BOUND, fold=fold)
    out = torch.full((B, T, H * V), torch.nan)
    module, place = plain("round")
    launch(
        module.round_block_kernel, place, B * H,
        *given, out, K**-0.5, 1e-5, BOUND, *strides(*given[:7]), given[8].stride(0),
        T=T, R=R, H=H, K=K, V=V, W=W, HELD=triton.next_power_of_2(W - 1 + (0 if fold else T)),
        FOLD=fold, WARPS=V // 16, AHEAD=False, EARLY=False,
    )  # fmt: skip
    assert_close(out, expected, limit=LIMIT)
    assert_close(given[8], wide[8], limit=LIMIT)
    for held_now, held_then in zip(given[4:7], wide[4:7], strict=True):
        torch.testing.assert_close(held_now.double(), held_then, rtol=0, atol=0, equal_nan=True)


def test_where_blocks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the interpreter; on matrix units where the gate bounds what is factored."""
    if not torch.cuda.is_available():
        assert not kda_blocks.in_blocks(8, 128, -5.0)
    monkeypatch.setattr(kda_blocks, "_matrix_units", lambda: True)
    assert kda_blocks.in_blocks(8, 128, -5.0)
    for rows, K, bound in ((1, 128, -5.0), (9, 128, -5.0), (8, 256, -5.0), (8, 128, 0.0)):
        assert not kda_blocks.in_blocks(rows, K, bound)
    assert not kda_blocks.in_blocks(8, 128, -11.0)


def test_which_states_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that begin on 16 bytes, each of them, where there is shared memory for one."""
    states = torch.zeros(2, 1, 64, 64)
    monkeypatch.setattr(kda_blocks, "_room", lambda: 227 * 2**10)
    assert kda_blocks.copied(states)
    assert not kda_blocks.copied(torch.zeros(2 * 64 * 64 + 1)[1:].view(2, 1, 64, 64))
    assert not kda_blocks.copied(torch.zeros(2, 64 * 64 + 8)[:, : 64 * 64].view(2, 1, 64, 64))
    monkeypatch.setattr(kda_blocks, "_room", lambda: 48 * 2**10)
    assert not kda_blocks.copied(states)


COMPILE = """
import sys, triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
name, arch, sizes = sys.argv[1], int(sys.argv[2]), dict(x.split("=") for x in sys.argv[3:])
kernel = getattr(import_module(f"dspark_kernels.kda_{name}_block_gluon"), f"{name}_block_kernel")
sizes = {x: int(n) if n.isdigit() else n == "True" for x, n in sizes.items()}
kinds = {"scale": "fp32", "bound": "fp32", "eps": "fp32", "accepted_ptr": "*i64"}
signature = {
    x: "constexpr" if x in sizes else kinds.get(x, "*fp32" if x.endswith("_ptr") else "i32")
    for x in kernel.arg_names
}
constants = {(kernel.arg_names.index(x),): n for x, n in sizes.items()}
source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants)
made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
print(made.asm["ptx"].count("mma.sync.aligned.m16n8k8.row.col.f32.tf32"))
"""


@pytest.mark.parametrize(
    ("name", "arch", "sizes", "products"),
    [
        (
            "step",
            90,
            "T=8 H=2 K=64 V=64 WARPS=4 WRITE=True COPIED=True EARLY=True",
            48 + 8 + 32 + 6,
        ),
        (
            "round",
            80,
            "T=4 R=4 H=2 K=64 V=64 W=4 HELD=8 FOLD=False WARPS=4 AHEAD=False EARLY=False",
            124,
        ),
    ],
)
def test_compiles(name: str, arch: int, sizes: str, products: int, tmp_path: Path) -> None:
    """For the card: all layouts fit without a move, or the compiler refuses them. The products are
    three of every eight keys and eight rows for what rows see, four for what they write."""
    here = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(Path(kda.__file__).parents[1]), here.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, name, str(arch), *sizes.split()],
        env={**here, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == products
