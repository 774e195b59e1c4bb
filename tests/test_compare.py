"""`dspark eval --compare`: contenders by name, the same prompts, figures in pairs, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dspark import cli, console
from dspark.draft.checkpoint import load_drafter
from dspark.errors import UserError
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.records import Generation, RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval.baselines.dflash import without_head
from dspark_eval.baselines.eagle import EagleConfig, EagleModel
from dspark_eval.baselines.folders import save_dflash, save_eagle
from dspark_eval.compare import CompareOptions, run_compare
from dspark_eval.compare_figures import held_against_the_law, summaries
from dspark_eval.compare_table import lossless_cell
from dspark_eval.contenders import Contender
from dspark_eval.fidelity import fidelity_warnings
from dspark_eval.intervals import MIN_PROMPTS
from tests import chat_tokenizers
from tests.table_target import TableTarget
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def baselines(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a DFlash drafter and an EAGLE-3 layer that know nothing."""
    folder = tmp_path_factory.mktemp("baselines")
    target = load_target(pair.target).target
    save_dflash(folder / "dflash", without_head(load_drafter(pair.draft, target)), {})
    torch.manual_seed(0)
    config = EagleConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=target.vocab_size,
        target_layer_ids=(1, 3),
        target_tap_kind="attn_res_mixture",
        block_size=BLOCK_SIZE,
    )
    save_eagle(folder / "eagle3", EagleModel(config), {})
    return str(folder / "dflash"), str(folder / "eagle3")


def test_every_contender_answers_as_plain_decoding_does(
    pair: TinyPair, baselines: tuple[str, str], tmp_path: Path
) -> None:
    names = (str(pair.draft), "lookup", f"model:{pair.target}", *baselines)
    options = CompareOptions(
        contenders=names,
        target=pair.target,
        suites=(str(pair.prompts),),
        max_new_tokens=12,
        out=tmp_path,
        quiet=True,
    )
    document = run_compare(options)
    assert json.loads(json.dumps(document)) == json.loads((tmp_path / "compare.json").read_text())
    kinds = [entry["kind"] for entry in document["contenders"]]
    assert kinds == ["dspark", "lookup", "ar", "dflash", "eagle3", "plain"]
    rows = {entry["name"]: entry for entry in document["suites"]["prompts"]["contenders"]}
    assert [row["greedy_mismatches"] for row in rows.values()] == [0] * 6
    assert [row["lossless"]["passed"] for row in rows.values()] == [True] * 6
    # the target drafting for itself is always right: 4 accepted and a bonus, until the text ends
    own = rows[f"model:{pair.target}"]
    assert own["acceptance_rate"]["value"] == 1
    assert own["ratio"]["ratio"] > 1
    assert rows["plain"]["accepted_length"]["value"] is None
    assert rows[names[0]]["ratio"] is None
    assert f"few prompts (3): below {MIN_PROMPTS}" in " ".join(document["warnings"])
    text = (tmp_path / "compare.md").read_text()
    assert all(name in text for name in names)


def test_the_same_prompts_and_seeds_give_the_same_answers_twice(pair: TinyPair) -> None:
    options = CompareOptions(
        contenders=(str(pair.draft), "lookup"),
        target=pair.target,
        suites=(str(pair.prompts),),
        max_new_tokens=10,
        temperature=1.0,
        quiet=True,
    )
    one, two = run_compare(options), run_compare(options)
    for a, b in zip(
        *(d["suites"]["prompts"]["contenders"] for d in (one, two)),
        strict=True,
    ):
        assert (a["emitted"], a["rounds"]) == (b["emitted"], b["rounds"])
        assert a["greedy_mismatches"] is None
        # 30 tokens are too few to tell a law by, and it is said that nothing was tested
        assert a["lossless"] == b["lossless"]
        assert (a["lossless"]["method"], a["lossless"]["tokens"]) == ("sampling", 30)


def test_one_contenders_wrong_law_is_found_among_right_ones() -> None:
    """The texts of one are drawn at temperature 0.8 and said to be of 1; 3,000 tokens each."""
    target = TableTarget.random(12, seed=1)
    prompts = [[3, 5]] * 60

    def texts(temperature: float, seed: int) -> list[Generation]:
        sampling = SamplingParams(temperature=temperature)
        return [
            plain_generate(
                target, prompt, max_new_tokens=50, sampling=sampling, end_token_ids=(),
                seed=seed + at,
            )
            for at, prompt in enumerate(prompts)
        ]  # fmt: skip

    answers = [texts(1.0, 0), texts(0.8, 1000), texts(1.0, 2000)]
    found = held_against_the_law(
        target, prompts, answers, SamplingParams(temperature=1.0), seed=0, sets=2
    )
    assert [entry["passed"] for entry in found] == [True, False, True]
    assert [entry["tokens"] for entry in found] == [3000] * 3
    assert found[0]["level"] == pytest.approx(found[0]["false_alarm"] / 12)  # 2 x 3 x 2 tests
    (said,) = fidelity_warnings(found[1])
    assert said.startswith("NOT LOSSLESS")
    assert lossless_cell(found[1]) == "NOT LOSSLESS, 3,000 tokens"


def answer(tokens: list[int], emitted: list[int], seconds: float) -> Generation:
    rounds = [RoundRecord(7, 7, e - 1, e, 2, 0.25, 0.5, 0.25, (), ()) for e in emitted]
    return Generation(tokens, "length", 0.0, seconds, rounds)


def test_ratios_speed_and_mismatches_by_hand() -> None:
    contenders = [Contender(n, k, None, 7, None) for n, k in
                  (("a", "dspark"), ("b", "lookup"), ("plain", "plain"))]  # fmt: skip
    texts = [[1] * 7, [2] * 13]
    a = [answer(texts[0], [2, 4], 3.0), answer(texts[1], [6, 6], 3.0)]  # 18 tokens, 4 rounds, 6 s
    b = [answer(texts[0], [2, 2, 2], 6.0), answer([9] * 13, [3, 3, 3, 3], 6.0)]  # 18, 7, 12 s
    plain = [answer(texts[0], [], 6.0), answer(texts[1], [], 12.0)]  # 18 tokens in 18 s
    first, second, last = summaries(contenders, [a, b, plain], SamplingParams(), seed=0)
    assert first["accepted_length"]["value"] == 18 / 4
    assert second["ratio"]["ratio"] == pytest.approx((18 / 7) / (18 / 4))
    assert second["ratio"]["wins"] == 0
    assert first["speedup"]["ratio"] == pytest.approx(3.0)
    assert second["speedup"]["ratio"] == pytest.approx(1.5)
    assert [row["greedy_mismatches"] for row in (first, second, last)] == [0, 1, 0]
    assert first["draft_share"]["value"] == 0.25
    assert last["ratio"] is last["speedup"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare", "lookup"], "expected two or more; got 1"),
        (["--compare", "lookup", "lookup"], "each once"),
        (["--compare", "DRAFT", "DRAFT/"], "each once"),
        (["--compare", "lookup", "model:"], "--compare model:: expected a model's name"),
        (["--compare", "lookup", "plain", "--max-new-tokens", "1000000000"], "tokens; expected at"),
        (["--compare", "lookup", "plain", "--suite", "PROMPTS"], "two sets are called prompts"),
        (["--compare", "lookup", "plain", "--suite-dir", "nowhere"], "--suite-dir nowhere: exp"),
        (["--compare", "plain", "lookup"], "expected a drafter first"),
        (["--compare", "lookup", "nowhere"], "expected plain, lookup, model:NAME or the folder"),
        (["--compare", "lookup", "plain", "--draft", "x"], "--draft: means something for one"),
        (["--compare", "lookup", "plain", "--run-code"], "--run-code: means something for one"),
        (["--compare", "lookup", "plain", "--n-prompts", "0"], "--n-prompts: expected 1 or more"),
        (
            ["--compare", "lookup", "plain", "--threads", "0"],
            "--threads: expected 1 or more; got 0",
        ),
        (["--compare", "lookup", "plain", "--dtype", "foo"], "--dtype: expected one of float32"),
        (
            ["--compare", "lookup", "plain", "--protocol", "dspark-paper", "--temperature", "0"],
            "--temperature: protocol dspark-paper has 1.0, not 0.0",
        ),
    ],
)
def test_wrong_comparisons_are_refused_in_a_line(
    words: list[str], said: str, pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"DRAFT": str(pair.draft), "PROMPTS": str(pair.prompts)}
    words = [places.get(w.rstrip("/"), w) + "/" * w.endswith("/") for w in words]
    suite = ["--target", str(pair.target), "--suite", str(pair.prompts)]
    assert console.run(cli.app, ["eval", *words, *suite]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_protocol_and_what_differs_from_it_stand_with_the_numbers(
    pair: TinyPair, tmp_path: Path
) -> None:
    words = ["--compare", "lookup", "plain", "--protocol", "dspark-paper", "--max-new-tokens", "6"]
    rest = ["--target", str(pair.target), "--suite", str(pair.prompts), "--out", str(tmp_path)]
    assert console.run(cli.app, ["eval", *words, *rest, "--json"]) == 0
    document = json.loads((tmp_path / "compare.json").read_text())
    assert (document["temperature"], document["draft_length"]) == (1.0, 7)
    assert document["protocol"]["name"] == "dspark-paper"
    wanted = "protocol dspark-paper: max_new_tokens is 6 here, 2048 there"
    assert wanted in document["protocol"]["departures"]
    assert f"warning: {wanted}" in (tmp_path / "compare.md").read_text()


def test_a_draft_length_beyond_a_block_is_refused(pair: TinyPair) -> None:
    options = CompareOptions(
        contenders=("lookup", str(pair.draft)),
        target=pair.target,
        suites=(str(pair.prompts),),
        draft_length=BLOCK_SIZE + 1,
    )
    with pytest.raises(UserError, match=f"drafts at most {BLOCK_SIZE}"):
        run_compare(options)


def test_a_drafter_of_another_tokenizer_is_refused_though_the_sizes_agree(
    pair: TinyPair, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(pair.draft, draft)
    chat_tokenizers.chatml().save_pretrained(draft)
    options = CompareOptions(
        contenders=("lookup", str(draft)), target=pair.target, suites=(str(pair.prompts),)
    )
    with pytest.raises(UserError, match="drafts for another tokenizer than the target's"):
        run_compare(options)


def test_what_is_not_asked_and_what_is_asked_twice_is_said(pair: TinyPair, tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"prompt": "one"}, {"turns": ["two", "three"]}]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = CompareOptions(
        contenders=("lookup", "plain"), target=pair.target, suites=(str(file),), max_new_tokens=2,
        quiet=True,
    )  # fmt: skip
    warnings = run_compare(options)["warnings"]
    assert "mine: 1 prompt asked before: each counts again" in warnings
    assert "mine: 1 prompt with later turns: only the first is asked" in warnings


def test_help_names_the_option() -> None:
    shown = CliRunner().invoke(cli.app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    assert "--compare" in shown
