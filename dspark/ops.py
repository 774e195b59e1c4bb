"""The only switch between plain torch and Triton.

Every op has a plain-torch reference and may have a Triton kernel of the same signature.
``DSPARK_OPS`` says which one runs:

    auto     (default) the kernel where the tensors lie on a GPU and it takes them, else torch
    torch    the reference, everywhere
    triton   the kernel, everywhere; an error that names the op where that cannot be

With ``triton`` a run that was asked to measure a kernel never measures another one in silence.
``TRITON_INTERPRET=1`` counts as a GPU there. ``backends`` says what each op would run with now,
``ran`` what it did run with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark_kernels import adamw as adamw_op
from dspark_kernels import (
    attn_res,
    distill_loss,
    kda,
    kda_states,
    linear_kda,
    markov_code,
    rng,
    train_rows,
)
from dspark_kernels import block_attention as block_attention_op
from dspark_kernels import calibrate as calibrate_op
from dspark_kernels import grad_norms as grad_norms_op
from dspark_kernels import kda_context_rows as kda_context_rows_op
from dspark_kernels import kda_decode as kda_decode_op
from dspark_kernels import kda_linear as kda_linear_op
from dspark_kernels import kda_output as kda_output_op
from dspark_kernels import latent_write as latent_write_op
from dspark_kernels import linear_rows as linear_rows_op
from dspark_kernels import low_rank_rows as low_rank_rows_op
from dspark_kernels import markov_sample as markov_sample_op
from dspark_kernels import mla_decode as mla_decode_op
from dspark_kernels import moe_decode as moe_decode_op
from dspark_kernels import moments as moments_op
from dspark_kernels import settle as settle_op
from dspark_kernels import verify_sample as verify_sample_op

P = ParamSpec("P")
R = TypeVar("R")
MODES = ("auto", "torch", "triton")
KDA_CHUNK = kda.CHUNK
"""Rows up to which `kda_step` is the better form."""
FEW_ROWS = linear_rows_op.MAX_ROWS
"""Rows up to which `linear_rows` has a kernel."""


@dataclass
class Op:
    """One operation and its implementations.

    Attributes:
        kernel: ``module:function`` in ``dspark_kernels``, imported when first needed, with the
            reference's signature; the module's ``refuses`` takes the same arguments and returns why
            the kernel cannot take them, or None. None: no such kernel exists.
        ran: What has run since the last ``forget``: ``torch``, ``triton`` or both.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str | None = None
    ran: set[str] = field(default_factory=set)

    @cached_property
    def triton(self) -> Callable[..., Any]:
        assert self.kernel is not None
        module, function = self.kernel.split(":")
        found = getattr(import_module(f"dspark_kernels.{module}"), function)
        assert callable(found)
        return found

    @cached_property
    def refuses(self) -> Callable[..., str | None]:
        assert self.kernel is not None
        found = import_module(f"dspark_kernels.{self.kernel.split(':')[0]}").refuses
        assert callable(found)
        return found

    def pick(self, args: tuple[Any, ...], more: dict[str, Any]) -> Callable[..., Any]:
        """The implementation for these arguments."""
        if not self.preferred(_on_gpu(args, more)):
            self.ran.add("torch")
            return self.reference
        reason = self.refuses(*args, **more)
        if reason is None:
            self.ran.add("triton")
            return self.triton
        if _mode() == "triton":
            raise UserError(
                f"DSPARK_OPS=triton, but the kernel of {self.name} does not take this: {reason}; "
                "use DSPARK_OPS=auto or torch"
            )
        self.ran.add("torch")
        return self.reference

    def preferred(self, on_gpu: bool) -> bool:
        """Whether the kernel is to run for tensors there, if it takes them.

        Raises UserError where DSPARK_OPS=triton cannot be met.
        """
        mode = _mode()
        if mode != "triton":
            return mode == "auto" and self.kernel is not None and on_gpu and _installed()
        if self.kernel is None:
            raise UserError(
                f"DSPARK_OPS=triton, but {self.name} has no Triton kernel; use DSPARK_OPS=auto or "
                "torch"
            )
        _demand_triton()
        return True


_OPS: dict[str, Op] = {}


def _op(name: str, reference: Callable[P, R], kernel: str | None = None) -> Callable[P, R]:
    op = _OPS[name] = Op(name, reference, kernel)

    @wraps(reference)
    def call(*args: P.args, **more: P.kwargs) -> R:
        result: R = op.pick(args, more)(*args, **more)
        return result

    return call


def triton_usable() -> tuple[bool, str]:
    """Whether Triton kernels can run here, and why not."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        return False, "no CUDA or ROCm GPU, and TRITON_INTERPRET is not 1"
    if not _installed():
        return False, "Triton is not installed"
    return True, "interpreter" if interpreted else torch.cuda.get_device_name()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _demand_triton() -> None:
    usable, why = triton_usable()
    if not usable:
        raise UserError(f"DSPARK_OPS=triton, but Triton cannot run here: {why}")


def _mode() -> str:
    mode = os.environ.get("DSPARK_OPS", "auto")
    if mode not in MODES:
        raise UserError(f"DSPARK_OPS is {mode!r}; expected one of {', '.join(MODES)}")
    return mode


def _on_gpu(args: tuple[Any, ...], more: dict[str, Any]) -> bool:
    given = (x[0] if isinstance(x, list) and x else x for x in (*args, *more.values()))
    return next((x.is_cuda for x in given if isinstance(x, Tensor)), False)


def by_kernel(name: str, tensor: Tensor) -> bool:
    """Whether an op runs as its kernel for tensors beside this one, where the kernel takes them."""
    return _OPS[name].preferred(tensor.is_cuda)


def backends() -> dict[str, str]:
    """What each op runs with now, where its kernel takes the tensors: ``torch`` or ``triton``.

    With ``DSPARK_OPS=triton`` an op without a kernel is ``none``: calling it is an error. Raises
    UserError where kernels are demanded and none can run.
    """
    mode = _mode()
    if mode == "triton":
        _demand_triton()
    kernels = mode == "triton" or (
        mode == "auto" and torch.cuda.is_available() and triton_usable()[0]
    )
    without = "none" if mode == "triton" else "torch"
    return {name: "triton" if kernels and op.kernel else without for name, op in _OPS.items()}


def ran() -> dict[str, str]:
    """What each op that was called did run with: ``torch``, ``triton`` or ``torch and triton``."""
    return {name: " and ".join(sorted(op.ran)) for name, op in _OPS.items() if op.ran}


def forget() -> None:
    """``ran`` starts again from nothing."""
    for op in _OPS.values():
        op.ran.clear()


kda_chunk = _op("kda_chunk", kda.chunk, "kda_chunk_triton:chunk")
kda_step = _op("kda_step", kda.step, "kda_step_triton:step")
kda_decode = _op("kda_decode", kda_decode_op.kda_decode, "kda_decode_triton:kda_decode")
kda_path = _op("kda_path", kda_decode_op.kda_path)
kda_states_at = _op("kda_states_at", kda_states.states_at, "kda_states_triton:states_at")
linear_kda_block = _op("linear_kda_block", linear_kda.block)
kda_linear = _op("kda_linear", kda_linear_op.kda_linear, "kda_linear_triton:kda_linear")
linear_kda_norm = linear_kda.norm_of_A
"""|A| of every block and head, for reports."""
mla_decode = _op("mla_decode", mla_decode_op.mla_decode, "mla_decode_triton:mla_decode")
kda_output = _op("kda_output", kda_output_op.kda_output, "kda_output_triton:kda_output")
mla_output = _op("mla_output", mla_decode_op.mla_output, "mla_output_triton:mla_output")
mla_absorb = _op("mla_absorb", latent_write_op.mla_absorb, "mla_absorb_triton:mla_absorb")
latent_write = _op("latent_write", latent_write_op.latent_write, "latent_write_triton:latent_write")
attn_res_mix = _op("attn_res_mix", attn_res.attn_res_mix, "attn_res_triton:attn_res_mix")
linear_rows = _op("linear_rows", linear_rows_op.linear_rows, "linear_rows_triton:linear_rows")
kda_context_rows = _op(
    "kda_context_rows",
    kda_context_rows_op.kda_context_rows,
    "kda_context_rows_triton:kda_context_rows",
)
kda_context_text = kda_context_rows_op.kda_context_rows
"""The same of a prompt's many rows, which are no matter of launches."""
calibrate = _op("calibrate", calibrate_op.calibrate, "calibrate_triton:calibrate")
low_rank_rows = _op(
    "low_rank_rows", low_rank_rows_op.low_rank_rows, "low_rank_rows_triton:low_rank_rows"
)
gated_rows = _op("gated_rows", linear_rows_op.gated_rows, "linear_rows_triton:gated_rows")
moe_decode = _op("moe_decode", moe_decode_op.moe_decode, "moe_grouped_triton:moe_decode")
MoE = moe_decode_op.MoE
Experts = moe_decode_op.Experts
pack_moe = moe_decode_op.pack
uniform = _op("uniform", rng.uniform, "rng_triton:uniform")
markov_sample = _op(
    "markov_sample", markov_sample_op.markov_sample, "markov_sample_triton:markov_sample"
)
verify_sample = _op(
    "verify_sample", verify_sample_op.verify_sample, "verify_sample_triton:verify_sample"
)
Drafted = markov_sample_op.Drafted
Coder = markov_code.Coder
Judged = verify_sample_op.Judged
DRAFT_STREAM, JUDGE_STREAM = rng.DRAFT, rng.JUDGE
distill_terms = _op("distill_terms", distill_loss.terms, "distill_loss_triton:terms")
distill_pull = _op("distill_pull", distill_loss.pull, "distill_loss_triton:pull")
adamw = _op("adamw", adamw_op.adamw, "adamw_triton:adamw")
Moments = adamw_op.Moments
Rates = adamw_op.Rates
round_moment = moments_op.round_moment
pack_moment = moments_op.pack_moment
unpack_moment = moments_op.unpack_moment
MOMENT_BLOCK = moments_op.BLOCK
grad_norms = _op("grad_norms", grad_norms_op.grad_norms, "grad_norms_triton:grad_norms")
settle = _op("settle", settle_op.settle, "settle_triton:settle")
up_to_the_end = settle_op.up_to_the_end
Settled = settle_op.Seats
LETTER_HEADS = settle_op.HEADS
block_attention = _op(
    "block_attention", block_attention_op.block_attention, "block_attention_triton:block_attention"
)
norm_rows = _op("norm_rows", train_rows.norm_rows, "train_rows_triton:norm_rows")
norm_rows_back = _op(
    "norm_rows_back", train_rows.norm_rows_back, "train_rows_triton:norm_rows_back"
)
norm_half_back = _op(
    "norm_half_back", train_rows.norm_half_back, "train_rows_triton:norm_half_back"
)
turn_heads = _op("turn_heads", train_rows.turn_heads, "train_rows_triton:turn_heads")
turn_heads_back = _op(
    "turn_heads_back", train_rows.turn_heads_back, "train_rows_triton:turn_heads_back"
)
gate_silu = _op("gate_silu", train_rows.gate_silu, "train_rows_triton:gate_silu")
gate_silu_back = _op(
    "gate_silu_back", train_rows.gate_silu_back, "train_rows_triton:gate_silu_back"
)
