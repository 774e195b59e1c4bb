"""`dspark generate`: the text is what was committed, and whatever goes wrong is one line."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.generation.asked import endings
from dspark.generation.reader import Reader
from dspark.runtime.records import Emitted
from tests import chat_tokenizers, generate_setup, tiny_pair
from tests.generate_setup import QUESTION, Run

pair, run = generate_setup.pair, generate_setup.run
document = generate_setup.document

REPO = Path(__file__).resolve().parent.parent


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
    assert text
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


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["", "--plain"], "got an empty value"),
        ([QUESTION, "--plain", "--max-new-tokens", "0"], "--max-new-tokens: expected 1 or more"),
        ([QUESTION, "--plain", "--max-new-tokens", f"{10**15}"], "not enough memory for so long"),
        ([QUESTION, "--plain", "--max-new-tokens", f"{10**30}"], "not enough memory for so"),
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
