"""What gets no recorded frame: passes that read values on the host, or that say something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_static_cache import HFStaticCache
from dspark.runtime.hf_static_check import HostRead, watch
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.static_pass import static_pass, unrecordable
from tests.hf_tiny import ROWS, SIZES, tiny_hf
from tests.test_hf_static import expected, requests, row_target


@pytest.mark.parametrize("name", ROWS)
def test_steps_of_these_can_be_recorded(name: str) -> None:
    """Nothing in them reads a value on the host; experts run as one grouped product."""
    assert unrecordable(row_target(tiny_hf(name))) is None


def rotary(kind: str, **more: float) -> RowTarget:
    torch.manual_seed(0)
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=parameters)
    return row_target(transformers.LlamaForCausalLM(config).float(), kind)


def test_passes_that_wait_for_the_device_are_found() -> None:
    assert re.search(r"modeling_rope_utils.py:\d+", str(unrecordable(rotary("dynamic"))))
    assert unrecordable(rotary("linear")) is None
    model = tiny_hf("qwen3-moe")
    model.set_experts_implementation("eager")
    assert "modeling_qwen3_moe.py" in str(unrecordable(row_target(model)))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(),
        lambda x: x if x.max() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_fill_(x > 0, 0)[torch.tensor([True] * len(x))],
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x, x.long().clamp(min=1)),
        lambda x: torch.equal(x, x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
    ],
)
def test_what_reads_values_is_seen(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostRead), watch():
        read(torch.ones(5))


def test_on_a_cpu_such_a_pass_runs_all_the_same() -> None:
    target = rotary("dynamic")
    asked = requests(2)
    found = GraphDecoder(target, seats=2, max_length=40).generate_many(asked)
    assert [g.tokens for g in found] == expected(target, asked)


def test_a_recurrent_model_is_refused() -> None:
    target = hf_target(tiny_hf("lfm2"), name="states", end_token_ids=())
    with pytest.raises(UserError, match=r"target states: .*attention layers alone.*Speculative"):
        GraphDecoder(target, max_length=20)
    assert unrecordable(target) is not None


def shifted(self: HFStaticCache, count: int) -> Any:
    rows = BEGIN(self, count)
    return replace(rows, positions=rows.positions + 1)


def blind(self: HFStaticCache, count: int) -> Any:
    rows = BEGIN(self, count)
    return replace(rows, masks={kind: mask * 0 for kind, mask in rows.masks.items()})


def forgetful(self: HFStaticCache, count: int) -> Any:
    self.lengths.clamp_(max=4)
    return BEGIN(self, count)


BEGIN = HFStaticCache.begin


@pytest.mark.parametrize("defect", [shifted, blind, forgetful])
def test_a_pass_that_says_something_else_is_refused(
    defect: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = row_target(tiny_hf("llama"))
    monkeypatch.setattr(HFStaticCache, "begin", defect)
    with pytest.raises(UserError, match="other logits than the model itself"):
        static_pass(target)
