"""`dspark doctor CKPT`: what was edited, damaged, left untrained or meant for another target is
named, each planted here; a sound drafter, in every layout, has nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dspark import cli, console
from dspark.distill.chat import ChatFormat
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.identity import identity_warnings
from dspark.doctor_checkpoint import CheckpointReport, examine_checkpoint
from dspark.doctor_target import MASK, Reinterpreted, Trial, better_ways, try_ways
from dspark.doctor_tensors import examine_tensors, looks_fresh
from dspark.draft import DraftConfig, DSparkDrafter, TargetRecord
from dspark.draft.checkpoint import TargetCopies, load_drafter, save_drafter
from dspark.draft.folder import write_folder
from dspark.draft.start import initialise
from dspark.errors import UserError
from dspark.interop.exporting import export_drafter
from dspark.interop.importing import import_drafter
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.target import TargetOutput
from dspark_eval.lengths import long_contexts
from dspark_eval.pair import load_pair
from dspark_eval.settings import BenchOptions
from dspark_eval.speed import PromptTimings
from tests.test_golden import EDITS, edit, made
from tests.tiny_drafters import FULL, MLA
from tests.tiny_pair import TinyPair, write_pair
from tests.toy_target import ToyCache, ToyTarget


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "draft", made(FULL))
    return tmp_path / "draft"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def change(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert tensors[name].shape == tensor.shape
    save_file({**tensors, name: tensor}, path)


def only(report: CheckpointReport) -> str:
    (text,) = report.findings
    return text


# ------------------------------------------------------------------ the folder alone


def test_a_sound_drafter_has_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(cli.app, ["doctor", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "positions 1, 100, 5000" in out
    assert "nothing found" in out
    assert console.run(cli.app, ["doctor", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["findings"] == []
    assert report["layout"] == "dspark"


@pytest.mark.parametrize("layout", ["sglang", "vllm", "speculators", "modelopt", "deepspec"])
def test_an_exported_drafter_is_examined_where_it_lies(
    folder: Path, tmp_path: Path, layout: str
) -> None:
    """Every layout says what it is, and what it wrote computes and means the same."""
    tables = TargetCopies(torch.randn(120, 48), torch.randn(120, 48))
    export_drafter(folder, tmp_path / "out", layout=layout, target_copies=tables)
    report = examine_checkpoint(tmp_path / "out")
    assert report.findings == ()
    assert report.replayed == (1, 100, 5000)
    edit(tmp_path / "out", {"rms_norm_eps": 1e-6})
    assert "rms_norm_eps" in only(examine_checkpoint(tmp_path / "out"))


def test_the_mla_layout_goes_there_and_back(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ours", made(MLA))
    export_drafter(tmp_path / "ours", tmp_path / "k3", layout="k3-mla")
    assert examine_checkpoint(tmp_path / "k3").ok
    import_drafter(tmp_path / "k3", tmp_path / "back")
    report = examine_checkpoint(tmp_path / "back")
    assert report.ok
    assert report.layout == "dspark"


def test_an_import_without_a_golden_vector_gets_one(folder: Path, tmp_path: Path) -> None:
    export_drafter(folder, tmp_path / "out", layout="sglang")
    (tmp_path / "out" / "golden.json").unlink()
    report = examine_checkpoint(tmp_path / "out")
    assert report.ok
    assert "no golden.json" in report.notes[0]
    import_drafter(tmp_path / "out", tmp_path / "back")
    assert examine_checkpoint(tmp_path / "back").replayed == (1, 100, 5000)


@pytest.mark.parametrize("name", ["rms_norm_eps", "tap kind", "layer ids", "theta"])
def test_edits_are_findings(folder: Path, name: str) -> None:
    _, values, expected = EDITS[name]
    edit(folder, values)
    report = examine_checkpoint(folder)
    assert any(expected in text for text in report.findings)


def test_an_edit_that_does_not_load_is_named_with_what_it_was(folder: Path) -> None:
    edit(folder, {"target_tap_kind": "prefix"})
    first, second = examine_checkpoint(folder).findings
    assert "expected one of residual" in first
    assert "target_tap_kind is 'prefix', 'residual' when it was written" in second


def test_weights_of_another_save_are_named(folder: Path) -> None:
    change(folder, "markov_head.markov_w2.weight", made(FULL, 1).markov_head.markov_w2.weight)
    report = examine_checkpoint(folder)
    assert "not those that were written: markov_head.markov_w2.weight" in report.findings[0]
    assert "bias" in report.findings[1]


def test_a_row_that_no_reading_touches_is_found_by_its_digest(folder: Path) -> None:
    tensor = load_file(folder / "model.safetensors")["markov_head.markov_w1.weight"].clone()
    tensor[0] += 1e-6
    change(folder, "markov_head.markov_w1.weight", tensor)
    assert "markov_w1" in only(examine_checkpoint(folder))


def test_damage_is_a_finding_and_no_drafter_at_all_is_wrong_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert console.run(cli.app, ["doctor", str(folder)]) == 1
    assert "not a readable safetensors file" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for args in (
        ["doctor", str(tmp_path / "nowhere")],
        ["doctor", str(tmp_path / "empty")],
        ["doctor", "--target", "nano"],
        ["doctor", str(folder), "--target", str(tmp_path / "nowhere")],
    ):
        assert console.run(cli.app, args) == 2
        assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------ weights


def fresh(init_scale: str) -> DSparkDrafter:
    config = replace(FULL, hidden_size=128, vocab_size=2000, markov_rank=64)
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(0), init_scale)
    return drafter


@pytest.mark.parametrize("init_scale", ["fan_in", "normal"])
def test_a_drafter_that_was_never_trained(init_scale: str) -> None:
    found = " ".join(examine_tensors(fresh(init_scale).state_dict().items()))
    assert "exactly 1" in found
    assert "hidden_norm.weight" in found
    assert "distributed as fresh weights: fc.weight" in found
    assert ("all zero" in found) == (init_scale == "fan_in")


def test_after_a_few_steps_nothing_looks_fresh() -> None:
    """Forty steps of AdamW at the default rate on any loss that reaches every weight."""
    drafter = fresh("normal")
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=2.5e-3)
    generator = torch.Generator().manual_seed(1)
    wanted = [0.05 * torch.randn(p.shape, generator=generator) for p in drafter.parameters()]
    for _ in range(40):
        optimiser.zero_grad()
        pairs = zip(drafter.parameters(), wanted, strict=True)
        torch.stack([(p - w).square().sum() for p, w in pairs]).sum().backward()
        optimiser.step()
    assert examine_tensors(drafter.state_dict().items()) == []


def test_the_statistic_holds_for_normal_draws_and_for_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(200, 200, generator=generator) for _ in range(100)]
    assert all(looks_fresh(0.02 * draw, 0.02) for draw in draws)
    assert not any(looks_fresh(0.022 * draw, 0.02) for draw in draws)
    assert not any(looks_fresh(0.02 * draw + 0.002, 0.02) for draw in draws)
    even = [(torch.rand(200, 200, generator=generator) - 0.5) * 12**0.5 for _ in range(50)]
    assert not any(looks_fresh(0.02 * draw, 0.02) for draw in even)
    assert not looks_fresh(0.02 * draws[0][:100], 0.02)  # too few to tell


def test_a_small_matrix_after_a_short_run_is_not_called_fresh() -> None:
    """Variance 5 % up, as 150 steps at hidden size 128 left it, is noise in 8,192 numbers."""
    draw = torch.randn(320, 128, generator=torch.Generator().manual_seed(0)) * 128**-0.5
    name = "layers.0.self_attn.k_proj.weight"
    assert examine_tensors([(name, draw[:64] * 1.05**0.5)]) == []
    assert examine_tensors([(name, draw * 1.06**0.5)]) == []
    assert name in examine_tensors([(name, draw)])[0]


def test_norms_near_one_in_half_precision_are_let_be() -> None:
    """Weights of 1 + 1e-4 are 1 in bf16: a norm or two may be, all of them are not by chance."""
    norms = {f"layers.{i}.input_layernorm.weight": torch.ones(8) for i in range(3)}
    moved = {**norms, "norm.weight": torch.full((8,), 1.5) + torch.arange(8)}
    assert "exactly 1" in examine_tensors(moved.items())[0]
    half = {name: tensor.bfloat16() for name, tensor in moved.items()}
    assert examine_tensors(half.items()) == []
    assert "exactly 1" in examine_tensors((n, t.bfloat16()) for n, t in norms.items())[0]


def test_constant_and_non_finite_tensors(folder: Path) -> None:
    tensor = made(FULL).fc.weight.detach().clone()
    tensor[2, 3] = float("inf")
    change(folder, "fc.weight", tensor)
    change(folder, "layers.1.mlp.up_proj.weight", torch.full((80, 48), 0.5))
    found = " ".join(examine_checkpoint(folder).findings)
    assert f"not finite: fc.weight (1 of {tensor.numel()})" in found
    assert "the same number everywhere: layers.1.mlp.up_proj.weight (0.5)" in found


# ------------------------------------------------------------------ beside a target

TOY = ToyTarget(reach=1, hidden_size=32, vocab_size=64)
SHAPE = DraftConfig(
    hidden_size=32, num_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    intermediate_size=16, vocab_size=64, num_target_layers=4, target_layer_ids=(0, 2),
    target_tap_kind="residual", mask_token_id=60, block_size=5, markov_rank=32,
    markov_head_type="gated", enable_confidence_head=False,
)  # fmt: skip


def knows_the_target(target: ToyTarget) -> DSparkDrafter:
    """The toy's next token depends on the last one alone, so a sequential head can be exact.

    Its gate, which looks at the hidden state, is what the tests open and close.
    """
    drafter = DSparkDrafter(SHAPE)
    head = drafter.markov_head
    with torch.no_grad():
        for linear in (m for m in drafter.layers.modules() if isinstance(m, nn.Linear)):
            linear.weight.zero_()
        head.markov_w1.weight.copy_(torch.tanh(target.weights["history"][0]))
        head.markov_w2.weight.copy_(50 * target.weights["head"])
        head.gate_proj.weight.zero_()
    return drafter.eval()


PROMPTS = [[3, 7, 5, 2, 8, 30, 11, 12], [40, 41, 4, 20, 21, 22, 23, 50]]


def test_a_drafter_whose_anchor_slot_predicts_works_as_recorded() -> None:
    drafter = knows_the_target(TOY)
    with torch.no_grad():
        drafter.markov_head.gate_proj.bias.fill_(50.0)  # open at every slot
    recorded, masked = try_ways(drafter, TOY, PROMPTS)
    assert recorded.recorded
    assert not masked.recorded
    # each round but the last: five accepted and the bonus; one slot fewer without the anchor's
    assert recorded.accepted_length > 5
    assert 4 < masked.accepted_length < recorded.accepted_length
    assert better_ways([recorded, masked]) == []


def test_a_drafter_of_the_other_slot_layout_is_told() -> None:
    """The gate opens on the embedding of the mask alone: the anchor slot says nothing useful."""
    drafter = knows_the_target(TOY)
    mask = drafter.norm(TOY.weights["embed"][SHAPE.mask_token_id])
    with torch.no_grad():
        drafter.markov_head.gate_proj.weight[:, :32] = 100 * mask / 32
        drafter.markov_head.gate_proj.bias.fill_(-75.0)
    recorded, masked = try_ways(drafter, TOY, PROMPTS)
    assert recorded.accepted_length < 2
    assert masked.accepted_length > 4
    (text,) = better_ways([recorded, masked])
    assert "sample_from_anchor false" in text


@dataclass(eq=False)
class TwoKinds(ToyTarget):
    """Delivers ones as one kind of tap and minus ones as the other."""

    tap_kinds: tuple[str, ...] = ("residual", "raw_prefix")

    def forward(self, tokens: Any, cache: ToyCache, *, taps: Any = None, **rest: Any) -> Any:
        out = super().forward(tokens, cache, taps=taps, **rest)
        if taps is None:
            return out
        sign = 1.0 if taps.kind == "raw_prefix" else -1.0
        return TargetOutput(out.hidden, torch.full_like(out.taps, sign))


def test_a_drafter_of_another_tap_kind_is_told() -> None:
    """Uniform attention carries the sign of the context to one channel, which opens the gate."""
    target = TwoKinds(reach=1, hidden_size=32, vocab_size=64)
    drafter = knows_the_target(target)
    attention = drafter.layers[0].self_attn
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[0] = 1.0
        attention.v_proj.weight[0, 0] = 1.0
        attention.o_proj.weight[31, 0] = 50.0
        drafter.markov_head.gate_proj.weight[:, 31] = 10.0
        drafter.markov_head.gate_proj.bias.zero_()
    trials = try_ways(drafter, target, PROMPTS)
    assert [trial.tap_kind for trial in trials] == ["residual", "residual", "raw_prefix"]
    assert trials[0].accepted_length < 2
    assert trials[2].accepted_length > 5
    (text,) = better_ways(trials)
    assert "target_tap_kind: with taps of kind raw_prefix" in text
    assert "config.json says residual" in text


def test_ways_that_are_about_as_good_are_no_finding() -> None:
    recorded = Trial("residual", "anchor", True, 3.0, 50)
    assert better_ways([recorded, replace(recorded, slot_layout=MASK, accepted_length=3.4)]) == []
    assert better_ways([recorded, replace(recorded, slot_layout=MASK, accepted_length=3.5)])


def test_reading_without_the_anchor_slot_is_the_block_without_its_first_row() -> None:
    drafter = made(FULL)
    target = ToyTarget(vocab_size=120, hidden_size=48, num_layers=9)
    way = Reinterpreted(drafter, target, "residual", MASK)
    context = drafter.new_context(1, 20)
    drafter.extend(context, torch.randn(1, 11, 3 * 48))
    mask = torch.tensor([[5, 7, 7, 7, 7]])
    whole = drafter.block_hidden(target.embed(mask), context)
    assert way.config.block_size == 4
    cut = way.block_hidden(target.embed(mask[:, :4]), context)
    torch.testing.assert_close(cut, whole[:, 1:])


def test_doctor_beside_a_k3_target(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights with a target's own reading: the same target agrees, one changed weight does not."""
    loaded = load_target(str(pair.target))
    drafter = load_drafter(pair.draft, loaded.target)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_drafter(tmp_path / "d", drafter, target=loaded.target)
    args = ["doctor", str(tmp_path / "d"), "--target", str(pair.target)]
    assert console.run(cli.app, args) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    for way in ("attn_res_mixture, slot 0 predicts, as recorded", "does not", "raw_prefix"):
        assert way in out
    with torch.no_grad():
        loaded.target.model.lm_head.weight.mul_(1.1)
    report = examine_checkpoint(tmp_path / "d", loaded)
    assert report.findings == ()
    assert report.target is not None
    assert "does not compute what it did" in report.target.findings[0]


def test_another_tokenizer_template_or_thinking_switch(pair: TinyPair, tmp_path: Path) -> None:
    loaded = load_target(str(pair.target))
    chat = ChatFormat(loaded.tokenizer)
    same = TargetRecord("t", tokenizer_fingerprint(loaded.tokenizer), chat.fingerprint, False)
    assert identity_warnings(same, chat) == []
    for other, expected in (
        (replace(same, tokenizer_hash="0" * 64), "tokenizer of t"),
        (replace(same, template_hash="0" * 64), "chat template of t"),
    ):
        config = replace(load_drafter(pair.draft).config, target=other)
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        save_drafter(tmp_path / "d", DSparkDrafter(config))
        beside = examine_checkpoint(tmp_path / "d", loaded).target
        assert beside is not None
        assert any(expected in text for text in beside.findings)
    assert "thinking on" in identity_warnings(replace(same, thinking=True), chat)[0]


def test_a_target_of_other_sizes_is_a_finding_and_nothing_is_decoded(folder: Path) -> None:
    loaded = load_target("nano")
    beside = examine_checkpoint(folder, LoadedTarget(loaded.target, loaded.tokenizer, loaded.path))
    assert beside.target is not None
    assert "hidden_size is 48" in " ".join(beside.target.findings)
    assert beside.target.trials == ()


def test_weights_that_are_no_numbers_end_the_trial_with_a_word(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = load_drafter(pair.draft)
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    save_drafter(tmp_path / "d", drafter)
    args = ["doctor", str(tmp_path / "d"), "--target", str(pair.target)]
    assert console.run(cli.app, [*args, "--dtype", "bfloat16"]) == 1
    out = capsys.readouterr().out
    assert "not finite: norm.weight (1 of" in out
    assert "drafter" in out.split("not finite")[-1]
    assert console.run(cli.app, [*args, "--dtype", "int8"]) == 2
    assert "expected one of float32" in capsys.readouterr().err


def test_a_damaged_golden_vector_is_a_finding_and_a_warning(pair: TinyPair, tmp_path: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "d")
    (tmp_path / "d" / "golden.json").write_text("{}")
    assert "not a golden vector" in examine_checkpoint(tmp_path / "d").findings[0]
    assert examine_checkpoint(tmp_path / "d").notes == ()
    (warning,) = load_pair(bench(pair, tmp_path / "d")).warnings
    assert "not a golden vector" in warning


# ------------------------------------------------------------------ bench and eval


def bench(pair: TinyPair, draft: Path, **more: Any) -> BenchOptions:
    return BenchOptions(draft=draft, target=pair.target, prompts=pair.prompts, quiet=True, **more)


def test_a_measurement_warns_of_what_doctor_would_find(pair: TinyPair, tmp_path: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "d")
    assert load_pair(bench(pair, tmp_path / "d")).warnings == ()
    edit(tmp_path / "d", {"rope_theta": 100.0})
    warnings = load_pair(bench(pair, tmp_path / "d")).warnings
    assert any("rope_theta is 100.0" in text for text in warnings)
    assert any("golden vector: position" in text for text in warnings)
    assert all("dspark doctor" in text for text in warnings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_in_any_precision_load_propose_and_replay(
    pair: TinyPair, tmp_path: Path, dtype: str, stored: torch.dtype
) -> None:
    save_drafter(tmp_path / "d", load_drafter(pair.draft), dtype=stored)
    loaded = load_pair(bench(pair, tmp_path / "d", dtype=dtype))
    assert loaded.warnings == ()
    answer = loaded.speculative(bench(pair, tmp_path / "d").sampling()[0], 8)([3, 4, 5], 0)
    assert any(record.drafted and record.confidence for record in answer.rounds)


def test_texts_beyond_the_training_rows_are_said_with_both_figures(
    pair: TinyPair, tmp_path: Path
) -> None:
    drafter = load_drafter(pair.draft)
    config = replace(drafter.config, target=TargetRecord("t", row_length=512))
    save_drafter(tmp_path / "d", DSparkDrafter(config))
    loaded = load_pair(bench(pair, tmp_path / "d"))
    decode = loaded.speculative(bench(pair, tmp_path / "d").sampling()[0], 10)

    def said(length: int) -> list[str]:
        prompt = [3 + i % 40 for i in range(length)]
        return long_contexts(loaded, [PromptTimings(length, [], [decode(prompt, 0)])])

    assert said(400) == []
    (text,) = said(508)
    assert "beyond the 512 tokens" in text
    assert "within" in text
    (text,) = said(700)
    assert "within" not in text


def test_a_folder_of_config_alone_is_not_examined(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in examine_checkpoint(folder).findings[0]
    with pytest.raises(UserError):
        examine_checkpoint(folder / "config.json")


def test_a_folder_with_a_pickle_is_not_opened(tmp_path: Path) -> None:
    write_folder(tmp_path / "d", {"architectures": ["x"]}, {"a": torch.zeros(1)})
    (tmp_path / "d" / "model.safetensors").rename(tmp_path / "d" / "pytorch_model.bin")
    assert "never opened" in examine_checkpoint(tmp_path / "d").findings[0]
