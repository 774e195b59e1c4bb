"""Options of `dspark generate` from the command line to the run, its figures, and its page."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dspark
import dspark.generation.run
from dspark import cli, console
from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.generation.account import Account
from dspark.generation.asked import rules_of
from dspark.generation.options import GenerateOptions
from dspark.runtime.cost_model import COST_MODEL_FILE, BatchCosts, CostModel
from dspark.runtime.records import RoundRecord
from tests import chat_tokenizers, generate_setup, tiny_pair
from tests.generate_setup import QUESTION, Run

pair, run = generate_setup.pair, generate_setup.run
document = generate_setup.document


def _record(**changed: Any) -> RoundRecord:
    record = RoundRecord(
        drafted=4, verified=4, accepted=2, emitted=3, level=2, draft_s=0.002, verify_s=0.006,
        other_s=0.002, confidence=(0.9, 0.8, 0.5, 0.25), entropy=(0.1, 0.2, 0.3, 0.4),
    )  # fmt: skip
    return dataclasses.replace(record, **changed)


def test_figures_of_a_generation() -> None:
    rounds = [_record(), _record(accepted=4, emitted=5, level=0, draft_s=0.012)]
    account = Account(list(range(9)), "stop", rounds, 0.5, 0.04)
    assert account.tokens_per_s == 8 / 0.04
    assert account.accepted_length == 4
    assert account.draft_share == pytest.approx(0.014 / 0.030)
    assert account.summary() == (
        "9 tokens, 200.0 tokens/s, accepted length 4.00 over 2 rounds, 47% of the time drafting, "
        "stop string"
    )
    columns = [list(column.cells) for column in account.table().columns]
    assert columns[0] == ["1", "2"]
    assert columns[4] == ["corrected", "all accepted"]
    assert columns[5] == ["90 80 | 50 25", "90 80 50 25 |"]
    assert columns[6] == ["2.0", "12.0"]
    assert Account([3], "end", [], 0.1, 0.0).summary() == "1 token, end token"


def test_step_times_beside_the_drafter_are_used(
    run: Run, pair: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    """`throughput` needs them; a drafter's folder may hold them, a file may be named instead."""
    args = (QUESTION, "--max-new-tokens", "4", "--policy", "throughput")
    code, _, err = run(*args, "--draft", pair.draft)
    assert code == 2
    assert "needs step times" in err
    costs = BatchCosts(1, 0.001, {1: 0.001, 4: 0.002}, {1: 0.001, 5: 0.003}, 0.0)
    written = json.dumps(CostModel((costs,), "t", "d", 9).to_dict())
    (tmp_path / "times.json").write_text(written)
    assert run(*args, "--draft", pair.draft, "--cost-model", tmp_path / "times.json")[0] == 0
    own = shutil.copytree(pair.draft, tmp_path / "own")
    (own / COST_MODEL_FILE).write_text(written)
    assert run(*args, "--draft", own)[0] == 0


def test_rules_are_none_unless_asked_for() -> None:
    tokenizer = chat_tokenizers.k3()
    assert rules_of(GenerateOptions("x"), tokenizer) is None
    found = rules_of(GenerateOptions("x", logit_bias=("a:1.5", "7:-inf")), tokenizer)
    assert found is not None
    a = tokenizer("a", add_special_tokens=False).input_ids[0]
    assert found.logit_bias == {a: 1.5, 7: float("-inf")}


def test_the_command_line_of_a_picture_asks_for_the_same() -> None:
    options = GenerateOptions(
        "it's", draft=Path("d"), stop=("a b", "c"), temperature=0.5, show_draft=True, siblings=1,
        svg=Path("x.svg"), device="cuda",
    )  # fmt: skip
    assert shlex.split(options.command()) == [
        "dspark", "generate", "it's", "--siblings", "1", "--temperature", "0.5",
        "--stop", "a b", "c", "--show-draft",
    ]  # fmt: skip


def test_defaults_are_those_of_the_options() -> None:
    owned = {field.name: field.default for field in dataclasses.fields(GenerateOptions)}
    shown = {
        {"as_json": "json"}.get(name, name): parameter.default
        for name, parameter in inspect.signature(cli.generate).parameters.items()
        if name != "plain"
    }
    assert set(shown) == set(owned)
    for name in set(owned) - {"prompt"}:
        default = shown[name]
        assert (tuple(default) if isinstance(default, list) else default) == owned[name], name


def test_every_option_arrives(
    run: Run, monkeypatch: pytest.MonkeyPatch, pair: tiny_pair.TinyPair
) -> None:
    seen: list[GenerateOptions] = []

    def take(options: GenerateOptions, remarks: Sequence[str]) -> dict[str, Any]:
        seen.append(options)
        return {"finish": "end"}

    monkeypatch.setattr(dspark.generation.run, "run_generate", take)
    args = (
        "q --draft d --policy auto --draft-length 3 --bands --siblings 1 --cost-model c.json "
        "--verification block --temperature 0.5 --top-p 0.9 --top-k 4 --max-new-tokens 9 "
        "--min-new-tokens 2 --stop a b --logit-bias 1:2 3:4 --repetition-penalty 1.1 "
        "--no-repeat-ngram 3 --seed 7 --system s --show-draft --stats --svg p.svg --threads 1 "
        "--device cuda:1 --dtype bfloat16"
    )
    assert run(*args.split())[0] == 0
    assert (seen[0].stop, seen[0].logit_bias) == (("a", "b"), ("1:2", "3:4"))
    for field in dataclasses.fields(GenerateOptions):
        if field.name not in ("raw", "json", "graphs"):  # each refused beside another
            assert getattr(seen[0], field.name) != field.default, field.name
    assert run("q", "--plain", "--raw", "--json")[0] == 0
    assert (seen[1].raw, seen[1].json, seen[1].draft) == (True, True, None)
    assert run("q", "--plain", "--graphs")[0] == 0
    assert seen[2].graphs


def _example(document: Path) -> str:
    """The indented block of a document that begins with an import from dspark."""
    text = document.read_text(encoding="utf-8")
    found = re.search(
        r"(^    from dspark import .*\n(?:^(?:    .*)?\n)*)", text, flags=re.MULTILINE
    )
    assert found is not None, document
    return re.sub(r"^    ", "", found[1], flags=re.MULTILINE)


def test_the_examples_of_the_documents_run(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], repo: Path
) -> None:
    """With an untrained drafter where the README has a trained one: the text is the target's."""
    example = _example(repo / "README.md")
    assert sum(bool(line) for line in example.splitlines()) == 7  # the import, five lines, a print
    target = dspark.load_target("nano").target
    config = DraftConfig(
        hidden_size=target.hidden_size, num_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32, vocab_size=target.table_size,
        num_target_layers=target.num_layers, target_layer_ids=(1, 3),
        target_tap_kind="attn_res_mixture", mask_token_id=target.table_size - 1, block_size=4,
        markov_rank=4,
    )  # fmt: skip
    save_drafter(Path("runs/mine"), DSparkDrafter(config))
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert console.run(cli.app, ["generate", _question(example), "--plain"]) == 0
    assert printed == capsys.readouterr().out
    exec(compile(_example(repo / "docs/generate.md"), "generate.md", "exec"), names)
    answer = names["answer"]
    text = names["nano"].tokenizer.decode(answer.tokens)
    assert (answer.finish == "stop") == ("####" in text or "\n\n" in text)
    assert len(answer.tokens) >= 16


def test_every_option_that_the_document_names_is_one(run: Run, repo: Path) -> None:
    text = (repo / "docs/generate.md").read_text(encoding="utf-8")
    _, help_text, _ = run("--help")
    for option in set(re.findall(r"--[a-z][a-z-]*", text)):
        assert re.search(rf"{option}\b", help_text), option


def _question(example: str) -> str:
    found = re.search(r'"content": "(.*?)"', example)
    assert found is not None
    return found[1]


def test_names_of_the_package_are_found_and_others_are_not() -> None:
    assert all(getattr(dspark, name) is not None for name in dspark.__all__)
    assert dir(dspark) == sorted(dspark.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_drafters'"):
        dspark.load_drafters  # noqa: B018
    assert dspark.SamplingParams(0.5).temperature == 0.5
    with pytest.raises(UserError):
        dspark.SamplingParams(-1.0)
