"""What parts of a drafter are worth: scores against what removing a unit really does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.distill.batches import make_batch
from dspark.distill.effects import Bench, price, scores
from dspark.distill.objective import batch_sums
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import axes
from dspark.draft.pruning.cutting import keep_layers
from dspark.draft.pruning.sizes import Size
from dspark.draft.shapes import KDAShape
from tests.distill_setup import SETTINGS, drafter, rows
from tests.toy_target import ToyTarget

pytest.importorskip("torch_pruning")

TARGET = ToyTarget()
ROWS = rows(TARGET, 8)
BATCHES = [make_batch(ROWS, ids, anchors=4, seed=0, epoch=0) for ids in ([0, 1, 2], [3, 4])]
TOKENS = replace(SETTINGS, confidence=0.0)
BENCH = Bench(TARGET, BATCHES, TOKENS)


def small(backbone: str = "attention", head: str = "vanilla") -> DSparkDrafter:
    torch.manual_seed(1)
    base = replace(drafter(TARGET).config, num_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, markov_head_type=head)  # fmt: skip
    if backbone == "kda":
        base = replace(base, backbone="kda", num_key_value_heads=4,
                       kda=KDAShape(order=1, gate_rank=4))  # fmt: skip
    made = DSparkDrafter(base)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.7 * parameter.shape[-1] ** -0.5)
    return made


def scaled(made: DSparkDrafter, name: str, unit: int, by: float) -> DSparkDrafter:
    """The drafter with one unit's output weights multiplied."""
    axis = axes(made.config)[name]
    assert axis.output is not None
    changed = DSparkDrafter(made.config)
    changed.load_state_dict(made.state_dict())
    with torch.no_grad():
        weight = changed.get_parameter(axis.output.name)
        weight[:, axis.output.indices([unit])] *= by
    return changed


@pytest.mark.parametrize(("backbone", "head"), [("attention", "gated"), ("kda", "rnn")])
def test_taylor_is_the_slope_of_the_loss_as_a_unit_fades(backbone: str, head: str) -> None:
    made = small(backbone, head).double()
    target = TARGET
    bench = Bench(target, BATCHES, TOKENS)
    found = scores(bench, made, "taylor")
    units = {name: axis.units for name, axis in axes(made.config).items()}
    assert {name: len(each) for name, each in found.items()} == units
    for name, unit in (("layers.0.heads", 1), ("layers.1.mlp", 5), ("markov", 3)):
        slopes = []
        for batch in BATCHES:
            values = []
            for by in (1.02, 0.98):
                sums = batch_sums(target, scaled(made, name, unit, by).double(), batch, TOKENS)
                values.append(float(sums.objective / sums.normaliser))
            slopes.append(abs(values[0] - values[1]) / 0.04)
        assert float(found[name][unit]) == pytest.approx(sum(slopes) / 2, rel=0.02, abs=1e-4)


def test_activation_is_the_mean_square_that_a_unit_adds() -> None:
    made = small("kda")
    seen: dict[str, list[Tensor]] = {}
    modules = {"layers.0.heads": made.layers[0].self_attn.o_proj,
               "layers.1.mlp": made.layers[1].mlp.down_proj}  # fmt: skip
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, args, name=name: seen.setdefault(name, []).append(args[0])
        )
        for name, module in modules.items()
    ]
    BENCH.loss(made)
    for hook in hooks:
        hook.remove()
    found = scores(BENCH, made, "activation")
    for name, module in modules.items():
        axis = axes(made.config)[name]
        x = torch.cat([part.reshape(-1, part.shape[-1]) for part in seen[name]])
        assert axis.output is not None
        added = []
        for unit in range(axis.units):
            columns = axis.output.indices([unit])
            added.append(float((x[:, columns] @ module.weight[:, columns].t()).square().sum()))
        wanted = torch.tensor(added, dtype=torch.float64)
        assert torch.allclose(found[name] / found[name].sum(), wanted / wanted.sum(), rtol=1e-4)


def test_scoring_leaves_the_drafter_as_it_was() -> None:
    made = small("kda", "rnn")
    made.fc.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    for importance in ("taylor", "activation"):
        scores(BENCH, made, importance)
        assert all(torch.equal(before[name], t) for name, t in made.state_dict().items())
        assert [n for n, p in made.named_parameters() if not p.requires_grad] == ["fc.weight"]
        assert all(p.grad is None for p in made.parameters())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in made.modules())


def test_a_dead_unit_scores_nothing_and_goes_first() -> None:
    made = scaled(scaled(small("kda"), "layers.0.heads", 2, 0.0), "layers.1.mlp", 7, 0.0)
    for importance in ("taylor", "activation"):
        found = scores(BENCH, made, importance)
        assert int(found["layers.0.heads"].argmin()) == 2
        assert int(found["layers.1.mlp"].argmin()) == 7
        assert float(found["layers.1.mlp"][7]) == 0.0


def test_prices_are_losses_of_drafters_that_were_cut() -> None:
    made = small("kda")
    told: list[str] = []
    prices = price(BENCH, made, scores(BENCH, made, "taylor"), told.append)
    whole = Size.of(made.config)
    assert prices.loss == BENCH.loss(made)
    for layer in (0, 1):
        rest = keep_layers(made, [1 - layer])
        assert prices.without[layer] == BENCH.loss(rest) - prices.loss
    assert prices.order[0] == min((0, 1), key=lambda layer: prices.without[layer])
    assert prices.lists["layers"] == {1: min(prices.without), 2: 0.0}
    assert set(prices.lists["heads"]) == {1, 2, 3, 4}
    assert prices.lists["heads"][4] == prices.lists["mlp"][whole.mlp] == 0.0
    assert len(prices.influence) == 2
    assert all(0 < influence < 2 for influence in prices.influence)
    assert len(told) == 4
