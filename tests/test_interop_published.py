"""The published K3 drafters: their layouts in small are read and draft on a tiny K3, their real
sizes are recognised, and every wrong word about them is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.draft.checkpoint import TargetCopies, load_drafter
from dspark.draft.model import DSparkDrafter
from dspark.draft.rotary import softmax_scale
from dspark.draft.shapes import Yarn
from dspark.errors import UserError
from dspark.interop import k3_mla, specforge, speculators
from dspark.interop.exporting import export_drafter
from dspark.interop.importing import import_drafter
from dspark.interop.spec import Given, Rope, Source, TargetFacts
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from tests import oracles
from tests import published_drafters as published
from tests.k3_tiny import tiny_model
from tests.published_drafters import PUBLISHED, Sizes

SMALL = Sizes()
RAW_AND_SHAPES: dict[str, tuple[Callable[[Sizes], dict[str, Any]], Callable[..., Any]]] = {
    "radixark": (published.radixark, published.gqa_shapes),
    "inferact": (published.inferact, published.mla_shapes),
    "redhat": (published.redhat, published.gqa_shapes),
}
# What the small ones leave open: they are nobody's published sizes.
STATED: dict[str, Given] = {
    "radixark": Given(tap_kind="attn_res_mixture", slot_layout="anchor"),
    "inferact": Given(tap_kind="raw_prefix", slot_layout="anchor", block_size=7),
    "redhat": Given(tap_kind="raw_prefix", num_target_layers=7),
}
LAYOUTS = {"radixark": "sglang", "inferact": "k3-mla", "redhat": "speculators"}


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(), "tiny", ())


@pytest.fixture
def tables(target: K3Target) -> TargetCopies:
    return TargetCopies(target.embed(torch.arange(61)), target.model.lm_head.weight)


def weights_of(name: str, tables: TargetCopies | None = None) -> dict[str, Tensor]:
    """The tensors of a folder, with the copies of the target's tables that it holds."""
    weights = published.random_weights(RAW_AND_SHAPES[name][1](SMALL))
    if tables is not None and name != "radixark":
        weights["embed_tokens.weight"] = tables.embed.bfloat16()
    if tables is not None and name == "redhat":
        weights["lm_head.weight"] = tables.lm_head.bfloat16()
    return weights


@pytest.mark.parametrize("name", RAW_AND_SHAPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_small_one_is_read_drafts_exactly_and_tells_its_tap_kind(
    tmp_path: Path, name: str, shards: int, target: K3Target, tables: TargetCopies
) -> None:
    raw = RAW_AND_SHAPES[name][0](SMALL)
    weights = weights_of(name, tables)
    folder = published.write(tmp_path / name, raw, weights, shards)
    done = import_drafter(folder, tmp_path / "ours", given=STATED[name], target_copies=tables)
    assert done.format.name == LAYOUTS[name]
    assert done.config.target_tap_kind == STATED[name].tap_kind
    assert done.config.target_layer_ids == SMALL.taps
    assert done.config.mask_token_id == SMALL.mask
    assert done.config.block_size == (8 if name == "redhat" else 7)
    assert done.unknown == ()
    drafter = load_drafter(tmp_path / "ours", target)
    # tied to what was stored: no tensor lost, renamed into another, or rounded
    held = sorted(float(t.float().norm()) for n, t in weights.items() if n not in done.dropped)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert sorted(float(t.float().norm()) for t in ours.values()) == held
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    decoder = SpeculativeDecoder(target, drafter)
    spoken = decoder.generate(
        prompt,
        max_new_tokens=12,
        sampling=SamplingParams(),
        draft_length=done.config.block_size,
        seed=0,
    )
    plain = plain_generate(target, prompt, max_new_tokens=12, sampling=SamplingParams(), seed=0)
    assert spoken.tokens == plain.tokens
    assert sum(record.drafted for record in spoken.rounds) > 0


@pytest.mark.parametrize("name", RAW_AND_SHAPES)
def test_a_small_one_goes_back_as_it_came(tmp_path: Path, name: str, tables: TargetCopies) -> None:
    raw = RAW_AND_SHAPES[name][0](SMALL)
    folder = published.write(tmp_path / name, raw, weights_of(name, tables))
    done = import_drafter(folder, tmp_path / "ours", given=STATED[name])
    export_drafter(tmp_path / "ours", tmp_path / "back", layout=LAYOUTS[name])
    theirs = load_file(folder / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == theirs.keys() - set(done.dropped)
    assert all(torch.equal(back[key], theirs[key]) for key in back)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in raw.items():
        if isinstance(value, dict) and key in config:
            assert value.items() <= config[key].items(), key
        else:
            assert config.get(key) == value, key
    # what was decided once stands in the file now
    assert import_drafter(tmp_path / "back", tmp_path / "again").decided == ()


@pytest.mark.parametrize("name", RAW_AND_SHAPES)
def test_a_tap_kind_that_is_missing_or_not_the_targets_is_refused(
    tmp_path: Path, name: str, target: K3Target
) -> None:
    folder = published.write(tmp_path / name, RAW_AND_SHAPES[name][0](SMALL), weights_of(name))
    given = STATED[name]
    silent = Given(None, given.slot_layout, block_size=given.block_size,
                   num_target_layers=given.num_target_layers)  # fmt: skip
    with pytest.raises(UserError, match=r"--tap-kind residual\|attn_res_mixture\|raw_prefix"):
        import_drafter(folder, tmp_path / "x", given=silent)
    facts = TargetFacts("tiny", 64, (61,), 7, target.tap_kinds)
    wrong = Given("residual", given.slot_layout, block_size=given.block_size, target=facts)
    with pytest.raises(UserError, match="'residual' is not offered by the target tiny, which has"):
        import_drafter(folder, tmp_path / "x", given=wrong)
    import_drafter(folder, tmp_path / "y", given=given)
    other = SimpleNamespace(
        name="plain", hidden_size=64, vocab_size=61, table_size=61, num_layers=7,
        tap_kinds=("residual",),
    )  # fmt: skip
    with pytest.raises(UserError, match="is not offered by the target plain"):
        load_drafter(tmp_path / "y", other)


def at_full_size(name: str, given: Given, **changes: Any) -> Any:
    """What the reader makes of the real configuration; its 4.5 GB of weights are only shapes."""
    reader = {
        "radixark": specforge.FORMAT.read,
        "inferact": k3_mla.read,
        "redhat": speculators.read,
    }
    raw = {**RAW_AND_SHAPES[name][0](PUBLISHED[name]), **changes}
    shapes = {
        key.replace("context_proj", "fc"): shape
        for key, shape in RAW_AND_SHAPES[name][1](PUBLISHED[name]).items()
    }
    return reader[name](Source(raw, shapes), given)


@pytest.mark.parametrize(
    ("name", "tap_kind", "tensors", "parameters"),
    [
        ("radixark", "attn_res_mixture", 62, 2_249_289_601),
        ("inferact", "raw_prefix", 67, 2_387_907_841),
        ("redhat", "raw_prefix", 62, 4_744_900_481 - 2 * 163840 * 7168),
    ],
)
def test_the_real_ones_are_recognised_and_have_the_published_number_of_parameters(
    name: str, tap_kind: str, tensors: int, parameters: int
) -> None:
    # only Red Hat's makers do not say what its taps held
    given = Given(tap_kind="raw_prefix") if name == "redhat" else Given()
    reading = at_full_size(name, given)
    assert reading.recognised is not None
    assert reading.config.target_tap_kind == tap_kind
    assert reading.config.num_target_layers == 93
    assert reading.config.block_size == (8 if name == "redhat" else 7)
    with torch.device("meta"):
        state = DSparkDrafter(reading.config).state_dict()
    assert len(state) == tensors
    assert sum(tensor.numel() for tensor in state.values()) == parameters


def test_yarns_temperature_survives_in_the_mla_drafter() -> None:
    """0.07217 * 1.81326: a loader that loses mscale runs at the first factor alone."""
    config = at_full_size("inferact", Given()).config
    assert math.isclose(softmax_scale(config), 0.13086, rel_tol=1e-4)
    assert config.yarn == Yarn(32.0, 32768, mscale=1.0, mscale_all_dim=1.0)


WRONG: dict[str, tuple[str, Given, dict[str, Any], str]] = {
    "RadixArk on raw taps": (
        "radixark", Given(tap_kind="raw_prefix"), {},
        r"--tap-kind raw_prefix: RadixArk.*: target_tap_kind: it was trained with attn_res_mixture",
    ),
    "Inferact on mixtures": (
        "inferact", Given(tap_kind="attn_res_mixture"), {}, "was trained with raw_prefix"
    ),
    "Red Hat on an unknown kind": (
        "redhat", Given(), {}, r"give --tap-kind .*vLLM captured, whose default is raw_prefix"
    ),
    "mask of another": (
        "inferact", Given(), {"mask_token_id": 163824},
        "mask_token_id: the file says 163824, Inferact.* was trained with 163837",
    ),
    "mask stated wrong": (
        "radixark", Given(mask_token_id=163837), {}, "--mask-token-id 163837: .*says 163824"
    ),
    "other slot layout": (
        "inferact", Given(slot_layout="mask"), {}, "it was trained with anchor"
    ),
    "other block size": ("inferact", Given(block_size=5), {}, "it was trained with 7"),
    "no revision of the rope": (
        "radixark", Given(),
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 16.0,
                             "original_max_position_embeddings": 32768}},
        "is no revision of RadixArk.*eb03982e: theta=10000; revision 3c5bac30: theta=10000,fac",
    ),
    "no rope at all": (
        "radixark", Given(), {"rope_parameters": None},
        "rope_parameters: not in the file.*--rope .revisions: revision eb03982e",
    ),
    "rope stated against the file": (
        "radixark", Given(rope=Rope(10000.0)), {}, "--rope theta=10000: .*the file says theta=10"
    ),
    "mscale lost": (
        "inferact", Given(),
        {"rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}},
        "rope_parameters: theta=50000 is no revision of Inferact",
    ),
    "taps counted as layers": (
        "inferact", Given(), {"num_target_layers": 93}, "in this class the key counts taps"
    ),
    "nope": ("inferact", Given(), {"rope_is_neox_style": True}, "pairs are interleaved"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_word_about_a_published_drafter_names_the_right_one(case: str) -> None:
    name, given, changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        at_full_size(name, given, **changes)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_revision_of_the_rope_is_told(scaled: bool) -> None:
    raw = published.radixark(PUBLISHED["radixark"], scaled=scaled)
    reading = at_full_size("radixark", Given(), **raw)
    name = "revision 3c5bac30" if scaled else "revision eb03982e"
    assert any(reason.endswith(name) for reason in reading.decided)
    assert (reading.config.yarn is not None) == scaled


def test_drafters_of_other_kinds_are_refused_with_the_reason(tmp_path: Path) -> None:
    modal = {
        **published.radixark(SMALL),
        "architectures": ["DFlashDraftModel"],
        "markov_rank": None,
    }
    modal["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": [0, 2, 4]}
    del modal["markov_head_type"]
    plain = {k: t for k, t in weights_of("radixark").items() if "head" not in k}
    lightseek = {**weights_of("inferact"), "fc_norm.0.weight": torch.ones(64)}
    bundled = {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5,
               "num_nextn_predict_layers": 1}  # fmt: skip
    dflash2 = {"architectures": ["DFlash2DraftModel"]}
    for name, raw, weights, message in (
        ("modal", modal, plain, "a plain DFlash drafter has no sequential head"),
        ("lightseek", published.inferact(SMALL), lightseek, "fc_norm.*a norm for each tap"),
        ("bundled", bundled, plain, "a drafter bundled into its target"),
        ("dflash2", dflash2, plain, "DFlash2 is another kind of drafter"),
    ):
        folder = published.write(tmp_path / name, raw, weights)
        with pytest.raises(UserError, match=message):
            import_drafter(folder, tmp_path / "ours", given=STATED["radixark"])


@pytest.mark.oracle
def test_a_drafter_that_nemo_made_is_read_and_computes_the_same(tmp_path: Path) -> None:
    """Its own configuration and state dict: MLA without positions, output gate, SiTU."""
    from tests.test_draft_mla import CASES, _nemo_config, train_blocks

    nemo = oracles.require("nemo_automodel.components.speculative.dspark.draft_kimi_k3")
    config = CASES["mla-gated-nope"]
    raw = vars(_nemo_config(config))
    model = nemo.KimiK3DSparkModel(_nemo_config(config)).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    raw |= {
        "architectures": ["KimiK3DSparkModel"],
        "hidden_act": "situ",
        "max_position_embeddings": 4096,
        "num_target_layers": config.num_target_layers,
    }
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = published.write(tmp_path / "nemo", raw, state)
    given = Given(tap_kind="raw_prefix", slot_layout="anchor")
    done = import_drafter(folder, tmp_path / "ours", given=given)
    assert done.format.name == "k3-mla"
    assert done.dropped == ("embed_tokens.weight", "lm_head.weight")
    drafter = load_drafter(tmp_path / "ours")
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(1, 20, width)
    embeds = torch.randn(1, 1, config.block_size, config.hidden_size)
    ours = train_blocks(drafter, features, embeds, [[11]])
    with torch.no_grad():
        theirs = model._forward_backbone(
            position_ids=torch.arange(11 + config.block_size)[None],
            attention_mask=None,
            noise_embedding=embeds[:, 0],
            target_hidden_states=features[:, :11],
        )
    assert torch.allclose(ours[:, 0], theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="--format k3-mla: attention without positions"):
        export_drafter(tmp_path / "ours", tmp_path / "x", layout="k3-mla")
