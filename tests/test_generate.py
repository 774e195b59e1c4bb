"""`dspark generate`: what it shows is what was committed, token by token, however it is shown."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dspark
import dspark.generation.run
from dspark import cli, console
from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.generation.account import Account
from dspark.generation.asked import endings, rules_of
from dspark.generation.options import GenerateOptions
from dspark.generation.reader import Piece, Reader
from dspark.generation.screen import BRACKETS, Marked, Plain, marked
from dspark.runtime.cost_model import COST_MODEL_FILE, BatchCosts, CostModel
from dspark.runtime.records import Emitted, EmittedKind, RoundRecord
from dspark.runtime.stops import StopStrings
from tests import chat_tokenizers, tiny_pair

REPO = Path(__file__).resolve().parent.parent
QUESTION = "What is 3 + 4?"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], pair: tiny_pair.TinyPair) -> Run:
    """Run `dspark generate` with the tiny target; gives exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        words = ["generate", *map(str, args), "--target", str(pair.target)]
        code = console.run(cli.app, words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def document(run: Run, pair: tiny_pair.TinyPair) -> Callable[..., dict[str, Any]]:
    """The JSON document of a run with the tiny drafter, or with --plain."""

    def call(*args: str | Path) -> dict[str, Any]:
        drafter = [] if "--plain" in args else ["--draft", pair.draft]
        code, out, err = run(QUESTION, "--json", "--max-new-tokens", "24", *args, *drafter)
        assert (code, err) == (0, "")
        return dict(json.loads(out))

    return call


# ----------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--siblings", "2"],
        ["--draft-length", "2", "--verification", "block"],
        ["--policy", "entropy"],
        ["--policy", "auto"],
        ["--repetition-penalty", "1.5", "--no-repeat-ngram", "3"],
        ["--logit-bias", "40:3", " total:-inf", "--min-new-tokens", "24"],
        ["--raw"],
        ["--system", "You are a helpful assistant."],
    ],
)
def test_a_drafter_changes_no_text(
    document: Callable[..., dict[str, Any]], options: list[str]
) -> None:
    """Greedy, so the tokens are the same; how they came about adds up to them."""
    of_drafter = ("--siblings", "--draft-length", "--verification", "--policy")
    plain = document("--plain", *([] if options[:1] and options[0] in of_drafter else options))
    fast = document(*options)
    assert fast["tokens"] == plain["tokens"]
    assert fast["text"] == plain["text"]
    assert (
        fast["new_tokens"]
        == len(fast["tokens"])
        == 1 + sum(record["emitted"] for record in fast["rounds"])
    )
    assert [emitted["token"] for emitted in fast["emitted"]] == fast["tokens"]
    assert "".join(emitted["text"] for emitted in fast["emitted"]) == fast["text"]
    assert [emitted["kind"] for emitted in plain["emitted"]] == (
        ["first"] + ["plain"] * (len(plain["tokens"]) - 1)
    )
    assert plain["drafter"] is None
    assert plain["accepted_length"] is None


def test_stdout_is_the_text_and_nothing_else(
    run: Run, document: Callable[..., dict[str, Any]], pair: tiny_pair.TinyPair
) -> None:
    text = document()["text"]
    assert BROKEN in text or text.isprintable() or text
    args = (QUESTION, "--draft", pair.draft, "--max-new-tokens", "24")
    assert run(*args) == (0, text + "\n", "")
    code, out, err = run(*args, "--stats")
    assert (code, out) == (0, text + "\n")
    assert re.search(
        r"24 tokens, [\d.]+ tokens/s, accepted length [\d.]+ over \d+ rounds, \d+%", err
    )
    assert re.search(r"round +drafted +verified +accepted +level", err)


BROKEN = "\N{REPLACEMENT CHARACTER}"


def test_the_prompt_may_come_from_stdin(
    run: Run, document: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = document("--plain")["text"]
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    assert run("-", "--plain", "--max-new-tokens", "24")[1] == text + "\n"


def test_a_stop_string_ends_text_tokens_and_rounds(
    document: Callable[..., dict[str, Any]],
) -> None:
    free = document()
    middle = next(e["text"] for e in free["emitted"][8:] if e["text"].strip(BROKEN))
    cut = document("--stop", middle, "never said")
    assert cut["finish"] == "stop"
    assert cut["stop"] == middle
    assert cut["text"] == free["text"][: free["text"].index(middle)]
    count = len(cut["tokens"])
    assert cut["tokens"] == free["tokens"][:count]
    assert 1 + sum(record["emitted"] for record in cut["rounds"]) == count
    before = "".join(e["text"] for e in free["emitted"][: count - 1])
    assert middle not in before
    assert middle in before + free["emitted"][count - 1]["text"]


def test_a_stop_string_that_is_a_special_token_ends_like_an_end_token(
    document: Callable[..., dict[str, Any]],
) -> None:
    tokenizer = chat_tokenizers.k3()
    special = tokenizer.convert_tokens_to_ids("<|sep|>")
    assert endings(["<|sep|>", "x"], tokenizer, [3]) == (["x"], [3, special])
    bias = ["--logit-bias", f"{special}:99", "--min-new-tokens", "5"]
    found = document("--stop", "<|sep|>", *bias)
    assert (found["finish"], found["stop"]) == ("end", None)
    assert found["tokens"][5:] == [special]


def test_a_seed_repeats_a_sampled_text_and_another_differs(
    document: Callable[..., dict[str, Any]],
) -> None:
    def sampled(seed: int) -> list[int]:
        found = document("--temperature", "1", "--top-p", "0.95", "--seed", str(seed))
        return list(found["tokens"])

    assert sampled(1) == sampled(1) != sampled(2)


# ---------------------------------------------------------------------------------- how it is shown


def _kinds(shown: str) -> list[tuple[str, str]]:
    """Kind and text of each token in brackets, from what a pipe receives."""
    pattern = "|".join(
        rf"{re.escape(left)}(?P<{kind}>.*?){re.escape(right)}"
        for kind, (left, right) in BRACKETS.items()
        if left
    )
    return [(str(m.lastgroup), m[str(m.lastgroup)]) for m in re.finditer(pattern, shown)]


def test_marks_say_where_each_token_came_from(
    run: Run, document: Callable[..., dict[str, Any]], pair: tiny_pair.TinyPair
) -> None:
    """Letters and spaces only, so that the text holds no bracket of its own."""
    tokenizer = chat_tokenizers.k3()
    words = [" apples", " total", " is", " step", "a", "The"]
    bias = [f"{tokenizer(word, add_special_tokens=False).input_ids[0]}:40" for word in words]
    options = ["--logit-bias", *bias, "--siblings", "2"]
    found = document(*options)
    code, out, _ = run(
        QUESTION, "--draft", pair.draft, "--max-new-tokens", "24", "--show-draft", *options
    )
    assert code == 0
    legend, shown = out.split("\n", 1)
    assert [kind for kind, _ in _kinds(legend)] == ["accepted", "sibling", "corrected", "bonus"]
    marks = [(e["kind"], e["text"]) for e in found["emitted"] if e["text"]]
    assert marks[0][0] == "first"
    assert _kinds(shown) == [(kind, text) for kind, text in marks if kind not in ("first", "plain")]
    assert len({kind for kind, _ in marks}) > 2
    for emitted in found["emitted"]:
        assert (emitted["confidence"] is not None) == (emitted["kind"] == "accepted")
    numbers = [int(n) for n in re.findall(r"\)(\d+)", shown)]
    assert numbers == [
        min(99, int(100 * e["confidence"])) for e in found["emitted"] if e["kind"] == "accepted"
    ]


@pytest.mark.parametrize(
    ("kind", "text", "confidence", "colour", "brackets"),
    [
        ("accepted", " a", 0.974, " a⁹⁷", "( a)97"),
        ("accepted", "a\n\nb", 0.999, "a⏎⁹⁹\n⏎\nb", "(a\\n\\nb)99\n\n"),
        ("accepted", "a", None, "a", "(a)"),
        ("sibling", "\n", None, "⏎\n", "<\\n>\n"),
        ("corrected", "é", None, "é", "[é]"),
        ("bonus", "x", None, "x", "{x}"),
        ("first", "x", None, "x", "x"),
        ("plain", "x\n", None, "x⏎\n", "x\n"),
    ],
)
def test_marks_of_each_kind(
    kind: EmittedKind, text: str, confidence: float | None, colour: str, brackets: str
) -> None:
    piece = Piece(text, Emitted(7, kind, confidence))
    assert marked(piece, colour=True).plain == colour
    assert marked(piece, colour=False).plain == brackets


def test_colours_on_a_terminal_and_brackets_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = io.StringIO()
        screen = Marked(out)
        screen.show(Piece("word", Emitted(7, "corrected")))
        screen.finish()
        return out.getvalue()

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mword\x1b[0m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[word]" in shown()
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in shown()


def test_the_picture_is_an_svg_of_the_marks_that_needs_no_network(
    run: Run, pair: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "a.svg"
    code, _, _ = run(
        QUESTION, "--draft", pair.draft, "--max-new-tokens", "9", "--show-draft", "--stats",
        "--svg", file,
    )  # fmt: skip
    assert code == 0
    text = file.read_text(encoding="utf-8")
    assert "@font-face" not in text
    assert set(re.findall(r"https?://[^\s\"]+", text)) <= {
        "http://www.w3.org/2000/svg", "https://www.textualize.io",
    }  # fmt: skip
    words = "".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ")
    for part in ("dspark generate", "--show-draft --stats", "bonus of the target", "9 tokens"):
        assert part in words
    assert str(pair.draft) not in words


# ------------------------------------------------------------------------------ pieces as they come


def _reader(stops: Sequence[str], ends: Sequence[int] = ()) -> tuple[Reader, list[str]]:
    shown: list[str] = []
    tokenizer = chat_tokenizers.k3()
    search = StopStrings(stops, tokenizer).start()
    return Reader(search, ends, lambda piece: shown.append(piece.text)), shown


def _emitted(text: str) -> list[Emitted]:
    ids = chat_tokenizers.k3()(text, add_special_tokens=False).input_ids
    return [Emitted(token, "plain") for token in ids]


def test_text_is_shown_as_it_is_committed(
    monkeypatch: pytest.MonkeyPatch, run: Run, pair: tiny_pair.TinyPair
) -> None:
    """After every round stdout holds all of its text, but for an unfinished character."""
    read, lengths = Reader.read, []

    def watched(self: Reader, emitted: Sequence[Emitted]) -> None:
        read(self, emitted)
        lengths.append((len(self.text), len(sys.stdout.getvalue())))  # type: ignore[attr-defined]

    monkeypatch.setattr(Reader, "read", watched)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert run(QUESTION, "--draft", pair.draft, "--max-new-tokens", "24")[0] == 0
    assert len(lengths) > 3
    assert all(certain == written for certain, written in lengths)


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    reader, shown = _reader([])
    for emitted in _emitted("a💩b"):
        reader.read([emitted])
    reader.finish()
    assert shown == ["a", "💩", "b"]
    assert [piece.text for piece in reader.pieces] == ["a", "", "", "", "💩", "b"]


def test_a_text_that_breaks_off_in_a_character_says_so_once() -> None:
    reader, shown = _reader([])
    reader.read(_emitted("a💩")[:3])
    reader.finish()
    assert shown == ["a", BROKEN]
    assert "".join(piece.text for piece in reader.pieces) == reader.text == f"a{BROKEN}"
    assert len(reader.pieces) == 3


def test_what_may_begin_a_stop_string_waits() -> None:
    reader, shown = _reader(["\n\nHuman:"])
    reader.read(_emitted("x"))
    reader.read(_emitted("\n"))
    assert shown == ["x"]
    reader.read(_emitted("y"))
    assert "".join(shown) == "x\ny"
    for emitted in _emitted("\n\nHuman: never shown"):
        if reader.found is None:
            reader.read([emitted])
    reader.finish()
    assert "".join(shown) == reader.text == "x\ny"
    assert reader.found == "\n\nHuman:"


def test_the_token_that_straddles_a_stop_is_cut() -> None:
    tokenizer = chat_tokenizers.k3()
    ordinary = range(256, min(tokenizer.added_tokens_decoder))
    token = max(ordinary, key=lambda i: len(tokenizer.decode([i])))
    text = tokenizer.decode([token])
    assert len(text) >= 4
    reader, shown = _reader([text[2:4]])
    reader.read([Emitted(token, "accepted", 0.5)])
    reader.finish()
    assert shown == [text[:2]]
    assert [piece.text for piece in reader.pieces] == [text[:2]]


def test_an_end_token_has_no_text_even_if_it_is_an_ordinary_word() -> None:
    ends = [_emitted("a")[0].token]
    reader, shown = _reader([], ends)
    reader.read(_emitted("ba"))
    reader.finish()
    assert (shown, len(reader.pieces)) == (["b"], 2)


# ------------------------------------------------------------------------------------ wrong and odd


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["", "--plain"], "got an empty value"),
        ([QUESTION, "--plain", "--max-new-tokens", "0"], "--max-new-tokens: expected 1 or more"),
        ([QUESTION, "--plain", "--min-new-tokens", "300"], "more than --max-new-tokens 256"),
        ([QUESTION, "--plain", "--temperature", "-1"], "temperature"),
        ([QUESTION, "--plain", "--top-p", "2"], "top_p"),
        ([QUESTION, "--plain", "--policy", "fixed"], "--policy: needs a drafter"),
        ([QUESTION, "--plain", "--siblings", "1"], "--siblings: needs a drafter"),
        ([QUESTION, "--plain", "--show-draft"], "--show-draft: needs a drafter"),
        ([QUESTION, "--plain", "--draft", "x"], "--plain decodes without a drafter"),
        ([QUESTION, "--draft", "x", "--policy", "best"], "--policy: expected one of fixed"),
        ([QUESTION, "--draft", "x", "--verification", "all"], "--verification: expected token or"),
        ([QUESTION, "--draft", "x", "--siblings", "-1"], "--siblings: expected 0 or more"),
        ([QUESTION, "--draft", "x", "--siblings", "65"], "--siblings: expected at most 64"),
        ([QUESTION, "--draft", "x", "--cost-model", "c"], "policy fixed reads no step times"),
        ([QUESTION, "--draft", "x", "--svg", "a.svg"], "--svg: a picture of --show-draft"),
        ([QUESTION, "--draft", "x", "--show-draft", "--json"], "--json: prints one document"),
        ([QUESTION, "--plain", "--raw", "--system", "s"], "--system: --raw writes no chat"),
        ([QUESTION, "--plain", "--dtype", "fp8"], "--dtype: expected one of float32"),
        ([QUESTION, "--plain", "--device", "gpu"], "cpu, cuda or cuda:N; got 'gpu'"),
        ([QUESTION, "--plain", "--repetition-penalty", "0"], "--repetition-penalty: expected"),
        ([QUESTION, "--plain", "--no-repeat-ngram", "-1"], "--no-repeat-ngram: expected 0 or"),
        ([QUESTION, "--draft", "nowhere"], "nowhere"),
        ([QUESTION, "--plain", "--logit-bias", "7"], "expected ID:NUMBER or TEXT:NUMBER"),
        ([QUESTION, "--plain", "--logit-bias", "7:x"], "expected ID:NUMBER or TEXT:NUMBER"),
        ([QUESTION, "--plain", "--logit-bias", "qqq:1"], "'qqq' is not one token but"),
        ([QUESTION, "--plain", "--logit-bias", "99999:1"], "token ids 0.."),
        ([QUESTION, "--plain", "--stop", "a", ""], "got an empty value"),
        (["<|end_of_msg|>", "--plain"], "prompt: a turn's text holds a token"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    run: Run, in_tmp: Path, args: list[str], expected: str
) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_an_empty_stdin_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    code, _, err = run("-", "--plain")
    assert (code, err.count("\n")) == (2, 1)
    assert "prompt: expected text, got nothing" in err


def test_a_prompt_that_is_no_text_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a \xff b"), encoding="utf-8")
    for args in (["a \udcff b"], ["-"]):
        monkeypatch.setattr("sys.stdin", stdin)
        assert run(*args, "--plain") == (2, "", "error: prompt: expected text in UTF-8\n")


def test_a_terminal_without_a_character_still_gets_the_text(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    e_acute = chat_tokenizers.k3()("é", add_special_tokens=False).input_ids
    bias = [f"{token}:90" for token in e_acute]
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    args = ["--plain", "--max-new-tokens", "9", "--logit-bias", *bias, "--no-repeat-ngram", "2"]
    assert run("x", *args)[0] == 0
    assert b"?" in raw.getvalue()


def test_without_a_drafter_it_decodes_plainly_and_says_so(run: Run, in_tmp: Path) -> None:
    code, out, err = run(QUESTION, "--max-new-tokens", "4")
    assert code == 0
    assert out
    assert err == (
        "note: no drafter in runs/nano-drafter, where `dspark distill` writes; decoding plainly, "
        "one token per step\n"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([QUESTION, "--siblings", "2"], "--siblings: needs a drafter"),
        ([QUESTION, "--logit-bias", "99999:1"], "token ids 0.."),
        (["<|end_of_msg|>"], "prompt: a turn's text holds a token"),
    ],
)
def test_nothing_is_noted_before_an_error(
    run: Run, in_tmp: Path, args: list[str], expected: str
) -> None:
    """That there is no drafter does not matter to whoever gets no text either way."""
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_ctrl_c_keeps_what_was_generated(
    run: Run, pair: tiny_pair.TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rounds = Reader.read, []

    def interrupting(self: Reader, emitted: Sequence[Emitted]) -> None:
        read(self, emitted)
        rounds.append(self.text)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "read", interrupting)
    code, out, err = run(QUESTION, "--draft", pair.draft, "--stats")
    assert code == 130
    assert out.startswith(rounds[-1])
    assert err.endswith("interrupted; what was generated is above\n")
    assert re.search(r"^\d+ tokens, interrupted$", err, flags=re.MULTILINE)
    rounds.clear()
    code, out, _ = run(QUESTION, "--draft", pair.draft, "--json")
    assert code == 130
    assert json.loads(out)["finish"] == "interrupted"
    assert json.loads(out)["tokens_per_s"] is None


def test_ctrl_c_as_a_signal(pair: tiny_pair.TinyPair) -> None:
    code = (
        "import signal, sys, dspark.cli;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"sys.argv[1:] = ['generate', 'x', '--plain', '--target', {str(pair.target)!r},"
        "'--max-new-tokens', '100000', '--logit-bias', 'a:99'];"
        "dspark.cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'kernels'}:{REPO / 'eval'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.read(3)  # streamed while it decodes
    assert first == "aaa", process.stderr.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(out) <= {"a", "\n"}
    assert err == "interrupted; what was generated is above\n"


def test_a_reader_that_leaves_early_is_no_error(pair: tiny_pair.TinyPair) -> None:
    command = [
        sys.executable, "-m", "dspark", "generate", "x", "--plain", "--target", str(pair.target),
        "--max-new-tokens", "3000", "--logit-bias", "a:99",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'kernels'}:{REPO / 'eval'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(2)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


# -------------------------------------------------------------------------------------- the account


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
        if field.name not in ("raw", "json"):  # each refused beside another
            assert getattr(seen[0], field.name) != field.default, field.name
    assert run("q", "--plain", "--raw", "--json")[0] == 0
    assert (seen[1].raw, seen[1].json, seen[1].draft) == (True, True, None)


# ------------------------------------------------------------------------------------- from Python


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
    assert isinstance(dspark.SamplingParams(0.5), object)
    with pytest.raises(UserError):
        dspark.SamplingParams(-1.0)
    assert Plain is not None
    assert torch.is_inference_mode_enabled() is False
