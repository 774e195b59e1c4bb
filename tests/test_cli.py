"""The command line parses what it says, passes on what it parses, and fails in one line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dspark
import dspark.distill.run
import dspark_eval.acceptance
import dspark_eval.bench
import dspark_eval.calibrate
from dspark import cli, console
from dspark.errors import UserError
from dspark_eval.settings import BenchOptions, CalibrateOptions, EvalOptions

REPO = Path(__file__).resolve().parent.parent
COMMANDS = [
    "distill", "eval", "bench", "calibrate", "prune", "import", "export", "inspect", "doctor",
    "study", "report", "generate",
]  # fmt: skip

TOO_LARGE = str(2**63)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; gives exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        code = console.run(cli.app, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the commands would have called, instead of calling it."""
    seen: dict[str, Any] = {}

    def take(name: str, answer: Any) -> Callable[..., Any]:
        def function(options: Any, **rest: Any) -> Any:
            seen.update({name: options, **rest})
            return answer

        return function

    (tmp_path / "training.json").write_text('[{"step": 1}, {"step": 2}]')
    monkeypatch.setattr(dspark.distill.run, "run_distill", take("distill", tmp_path))
    monkeypatch.setattr(dspark_eval.acceptance, "run_eval", take("eval", {"suites": {}}))
    monkeypatch.setattr(dspark_eval.bench, "run_bench", take("bench", {"speedup": 2.0, "runs": []}))
    monkeypatch.setattr(dspark_eval.calibrate, "run_calibrate", take("calibrate", {"settings": []}))
    return seen


def _raise(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **rest: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert re.search(rf"Example:\s+dspark {command}", out)


def test_root_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "Usage" in out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"dspark {dspark.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["bench", "--batc", "1"], "--batch"),
        (["distill", "--promts", "a.jsonl"], "--prompts"),
        (["eval", "--drft", "x"], "--draft"),
        (["benhc"], "bench"),
        (["bench", "--batch", "one"], "--batch"),
        (["bench", "--batch", "2", "--draft", "x"], "--batch: expected 1"),
        (["bench", "--draft", "x", "--temperature", "-1"], "temperature"),
        (["bench", "--draft", "x", "--temperature", "nan"], "temperature"),
        (["bench", "--draft", "x", "--top-p", "0"], "top"),
        (["bench", "--draft", "x", "--n-prompts", "0"], "--n-prompts"),
        (["eval", "--draft", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["eval", "--draft", "x", "--dtype", "fp32"], "float32"),
        (["bench", "--draft", "x", "--device", "cuda:x"], "cpu, cuda or cuda:N; got 'cuda:x'"),
        (["eval", "--draft", "x", "--device", "gpu"], "cpu, cuda or cuda:N; got 'gpu'"),
        (["distill", "--set", "target.device=cuda:x"], "expected auto, cpu or cuda"),
        (["distill", "--set", "train.lr"], "section.key=value"),
        (["distill", "--set", "train.lrr=1"], "did you mean train.lr"),
        (["distill", "--set", "tran.lr=1"], "did you mean train"),
        (["distill", "--set", "train.lr=[1"], "train.lr=[1"),
        (["distill", "--steps", "-3"], "max_steps"),
        (["distill", "--config", "none.yaml"], "none.yaml"),
        (["doctor", "extra"], "extra"),
        (["bench", "--draft", "x", "--prompts", "a.jsonl", "b.jsonl"], "b.jsonl"),
        (["eval", "--draft", "x", "--temperature", "0", "1"], "1"),
        (["bench", "--draft", ""], "--draft: got an empty value"),
        (["distill", "--out", ""], "--out: got an empty value"),
        (["bench", "--draft", "x", "--seed", "-1"], "--seed: expected 0 or more"),
        (["bench", "--draft", "x", "--seed", TOO_LARGE], "--seed: expected at most"),
        (["eval", "--draft", "x", "--seed", TOO_LARGE], "--seed: expected at most"),
        (["eval", "--compare", "x", "lookup", "--seed", TOO_LARGE], "--seed: expected at most"),
        (["calibrate", "--draft", "x", "--seed", TOO_LARGE], "--seed: expected at most"),
        (["generate", "a", "--seed", TOO_LARGE], "--seed: expected at most"),
        (["distill", "--seed", TOO_LARGE], "train.seed: expected at most"),
        (["distill", "--set", f"data.seed={TOO_LARGE}"], "data.seed: expected at most"),
        (["study", "family", "--out", "x", "--seeds", TOO_LARGE], "expected 1 to 1000"),
        (["study", "family", "--out", "x", "--set", f"data.seed={TOO_LARGE}"], "data.seed: "),
        (["eval", "--draft", "x", "--threads", "100000"], "--threads: expected at most"),
        (["distill", "--set", "train.lr=2024-13-45"], "not YAML"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    run: Run, caught: dict[str, Any], in_tmp: Path, args: list[str], expected: str
) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert not caught


def test_a_bad_line_of_a_config_is_named(run: Run, in_tmp: Path) -> None:
    Path("run.yaml").write_text("train:\n  lr: 1e-3\n  epoch: 2\n")
    code, _, err = run("distill", "--config", "run.yaml")
    assert code == 2
    assert "run.yaml:3" in err
    assert "train.epochs" in err


@pytest.mark.parametrize("command", ["bench", "eval", "calibrate"])
def test_without_a_drafter_it_says_where_it_looked(run: Run, in_tmp: Path, command: str) -> None:
    code, _, err = run(command)
    assert code == 2
    assert "dspark distill" in err
    assert "--draft DIR" in err


@pytest.mark.parametrize("command", ["bench", "eval", "calibrate"])
def test_default_drafter_is_where_distill_writes(
    run: Run, caught: dict[str, Any], in_tmp: Path, command: str
) -> None:
    from dspark.distill.config import load_config

    folder = Path(load_config().out.dir)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert run(command)[0] == 0
    assert caught[command].draft == folder


RENAMED = {"suite": "suites", "json_file": "json", "check": "check_texts"}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (cli.bench, BenchOptions),
        (cli.calibrate, CalibrateOptions),
        (cli.evaluate, EvalOptions),
    ],
)
def test_defaults_are_those_of_the_options(function: Callable[..., None], options: type) -> None:
    owned = {field.name: field.default for field in dataclasses.fields(options)}
    shown = {
        RENAMED.get(name, name): parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("context", "draft", "as_json", "compare")
    }
    assert set(shown) == set(owned) - {"draft", "quiet", "command"}
    for name, default in shown.items():
        assert (tuple(default) if isinstance(default, list) else default) == owned[name], name


def test_calibrate_takes_several_sets_and_temperatures(run: Run, caught: dict[str, Any]) -> None:
    code, out, _ = run(
        "calibrate", "--draft", "d", "--prompts", "a.jsonl", "nano-validation",
        "--temperature", "0", "0.7", "--top-p", "0.9", "--sglang", "s", "--profile", "--json",
    )  # fmt: skip
    assert (code, json.loads(out)) == (0, {"settings": []})
    options = caught["calibrate"]
    assert options.suites == ("a.jsonl", "nano-validation")
    assert [(s.temperature, s.top_p) for s in options.sampling()] == [(0.0, 0.9), (0.7, 0.9)]
    assert (options.sglang, options.profile, options.quiet) == (Path("s"), True, True)
    assert options.replace is False
    run("calibrate", "--draft", "d", "--cost-model", "c.json", "--replace")
    assert caught["calibrate"].cost_model == Path("c.json")
    assert caught["calibrate"].replace is True


def test_every_option_of_bench_arrives(run: Run, caught: dict[str, Any]) -> None:
    args = (
        "--batch 1 --draft d --target t --prompts p.jsonl --n-prompts 3 --max-new-tokens 9 "
        "--draft-length 5 --temperature 0.5 1 --top-p 0.9 --top-k 4 --seed 7 "
        "--policy entropy --bands --high 0.8 --low 0.2 --siblings 1 --verification block "
        "--cost-model c.json "
        "--warmup 1 --repeats 2 --threads 1 --device cuda:1 --dtype bfloat16 --peer --profile "
        "--json j.json --plot p.png"
    )
    assert run("bench", *args.split())[0] == 0
    options = caught["bench"]
    assert options.temperature == (0.5, 1.0)
    # relaxed and graphs go with token verification, a batch with graphs, quiet is tested below
    same = {"batch", "quiet", "relaxed", "graphs"}
    for field in dataclasses.fields(options):
        if field.name not in same:
            assert getattr(options, field.name) != field.default, field.name
    assert run("bench", "--draft", "d", "--relaxed")[0] == 0
    assert caught["bench"].relaxed
    assert run("bench", "--draft", "d", "--graphs", "--batch", "3")[0] == 0
    assert (caught["bench"].graphs, caught["bench"].batch) == (True, 3)


def test_every_option_of_eval_arrives(run: Run, caught: dict[str, Any]) -> None:
    args = (
        "--draft d --target t --suite a b --prompts c.jsonl --n-prompts 3 --max-new-tokens 9 "
        "--draft-length 5 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 7 --threads 1 "
        "--policy auto --bands --high 0.8 --low 0.2 --siblings 1 --verification block "
        "--cost-model c.json --profile "
        "--suite-dir . --turns 2 --plain 4 --no-check --run-code --concurrency 1 4 "
        "--rounds r.jsonl "
        "--device cuda --dtype bfloat16 --out o --json"
    )
    code, out, _ = run("eval", *args.split())
    assert (code, json.loads(out)) == (0, {"suites": {}})
    options = caught["eval"]
    assert options.suites == ("a", "b", "c.jsonl")
    for field in dataclasses.fields(options):
        # one goes with token verification, the other is tested below
        if field.name not in ("relaxed", "protocol"):
            assert getattr(options, field.name) != field.default, field.name
    run("eval", "--draft", "d", "--relaxed", "--json")
    assert caught["eval"].relaxed


def test_a_protocol_replaces_defaults_and_nothing_that_was_said(
    run: Run, caught: dict[str, Any]
) -> None:
    call = ("eval", "--draft", "d", "--protocol", "dspark-paper", "--json")
    assert run(*call)[0] == 0
    options = caught["eval"]
    assert (options.temperature, options.draft_length, options.turns) == (1.0, 7, 1)
    assert (options.n_prompts, options.max_new_tokens, options.seed) == (None, 2048, 980406)
    assert run(*call, "--n-prompts", "100", "--max-new-tokens", "64")[0] == 0
    assert (caught["eval"].n_prompts, caught["eval"].max_new_tokens) == (100, 64)
    assert run(*call, "--temperature", "1.0")[0] == 0
    # 0 is the default, but here it was said
    for option, value in (("--temperature", "0"), ("--policy", "entropy"), ("--turns", "2")):
        code, _, err = run(*call, option, value)
        assert code == 2
        assert f"{option}: protocol dspark-paper has" in err
    code, _, err = run("eval", "--draft", "d", "--protocol", "dspark")
    assert (code, "expected one of dspark-paper" in err) == (2, True)


def test_every_option_of_distill_arrives(run: Run, caught: dict[str, Any], in_tmp: Path) -> None:
    Path("run.yaml").write_text("train:\n  seed: 3\n  epochs: 9\n")
    code, out, _ = run(
        "distill", "--config", "run.yaml", "--target", "t", "--prompts", "a", "b", "--out", "o",
        "--steps", "11", "--seed", "5", "--set", "train.lr=1e-4", "drafter.tap_ids=[1, 2]",
        "--resume", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["last"] == {"step": 2}
    config = caught["distill"]
    assert caught["resume"] is True
    assert (config.target.name, config.data.prompts, config.out.dir) == ("t", ("a", "b"), "o")
    assert (config.train.max_steps, config.train.seed, config.train.epochs) == (11, 5, 9)
    assert (config.train.lr, config.drafter.tap_ids) == (1e-4, (1, 2))


def test_distill_alone_takes_every_default(run: Run, caught: dict[str, Any]) -> None:
    from dspark.distill.config import load_config

    assert run("distill")[0] == 0
    assert (caught["distill"], caught["resume"]) == (load_config(), False)


def test_bench_json_to_stdout_is_only_json(run: Run, caught: dict[str, Any]) -> None:
    code, out, _ = run("bench", "--draft", "d", "--json", "-")
    assert (code, json.loads(out)) == (0, {"speedup": 2.0, "runs": []})
    assert caught["bench"].quiet
    assert caught["bench"].json is None


def test_user_error_in_a_command_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = dspark.errors.UserError("f.jsonl:3: expected `prompt`;\n  add it")
    monkeypatch.setattr(dspark_eval.bench, "run_bench", _raise(error))
    assert run("bench", "--draft", "d") == (
        2, "", "error: f.jsonl:3: expected `prompt`; add it\n"
    )  # fmt: skip


def test_our_own_defects_keep_their_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark_eval.bench, "run_bench", _raise(RuntimeError("defect")))
    with pytest.raises(RuntimeError, match="defect"):
        run("bench", "--draft", "d")


@pytest.mark.parametrize(
    ("args", "again"),
    [
        (["distill", "--out", "a b"], "dspark distill --out 'a b' --resume"),
        (["distill", "--resume"], "dspark distill --resume"),
        (["bench", "--draft", "d"], "dspark bench --draft d"),
    ],
)
def test_ctrl_c_says_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], again: str
) -> None:
    monkeypatch.setattr(dspark.distill.run, "run_distill", _raise(KeyboardInterrupt()))
    monkeypatch.setattr(dspark_eval.bench, "run_bench", _raise(KeyboardInterrupt()))
    code, out, err = run(*args)
    assert (code, out) == (130, "")
    assert err.endswith(f": {again}\n")
    assert err.count("\n") == 1


def test_ctrl_c_as_a_signal() -> None:
    # A shell starts background jobs with the signal ignored, and children inherit that.
    code = (
        "import signal, sys, time, dspark.cli, dspark.doctor;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "dspark.doctor.examine = lambda: (print('ready', flush=True), time.sleep(60));"
        "sys.argv[1:] = ['doctor']; dspark.cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={"PYTHONPATH": f"{REPO}:{REPO / 'kernels'}:{REPO / 'eval'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert err.startswith("interrupted")


def test_python_m_dspark() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "dspark", "bench", "--nonsense"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: No such option: --nonsense")


def test_values_spread_to_the_option_before_them() -> None:
    spread = console.spread_values
    assert spread(["distill", "--prompts", "a", "b", "--out", "c"]) == [
        "distill", "--prompts", "a", "--prompts", "b", "--out", "c"
    ]  # fmt: skip
    assert spread(["bench", "--temperature", "0", "1"]) == [
        "bench", "--temperature", "0", "--temperature", "1"
    ]  # fmt: skip
    assert spread(["bench", "--draft", "a", "b"]) == ["bench", "--draft", "a", "b"]


def _assert_exists(run: Run, line: str) -> None:
    """Every option of a written command line is one that the command has."""
    command, *rest = line.split("#")[0].split()
    code, out, _ = run(command, "--help")
    assert code == 0, line
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{option}\b", out), line


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_commands_exist(run: Run, document: str) -> None:
    text = (REPO / document).read_text(encoding="utf-8")
    for line in re.findall(r"^ +dspark (.+)$", text, flags=re.MULTILINE):
        _assert_exists(run, line)


def test_the_demo_uses_commands_that_exist(run: Run, tmp_path: Path) -> None:
    listing = subprocess.run(
        ["make", "-n", "demo", f"DEMO_VENV={tmp_path}", f"DEMO_RUN={tmp_path / 'run'}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = re.findall(r"-m dspark (.+)$", listing.replace("\\\n", " "), flags=re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["distill", "bench"] * 2
    for line in lines:
        _assert_exists(run, line)
    # a bare, newer torch is several times the size: the pinned one comes first, on its own
    assert listing.index("torch==2.13.0") < listing.index("-c constraints.txt")


def test_a_file_in_the_way_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = FileNotFoundError(2, "No such file or directory", "/proc/there")
    monkeypatch.setattr(dspark_eval.acceptance, "run_eval", _raise(blocked))
    code, out, err = run("eval", "--draft", ".")
    assert (code, out, err) == (2, "", "error: /proc/there: No such file or directory\n")


def test_a_key_given_twice_is_refused(run: Run, caught: dict[str, Any]) -> None:
    code, _, err = run("distill", "--steps", "5", "--set", "train.max_steps=9")
    assert code == 2
    assert "train.max_steps is given twice" in err
    assert not caught


def test_a_warning_is_one_line_without_our_code(run: Run, monkeypatch: pytest.MonkeyPatch):
    def warn(options: EvalOptions) -> dict[str, Any]:
        warnings.warn("the folder has\nno chat template", stacklevel=1)
        raise UserError("and nothing else")

    monkeypatch.setattr(dspark_eval.acceptance, "run_eval", warn)
    code, out, err = run("eval", "--draft", "x")
    assert (code, out) == (2, "")
    assert err == "warning: the folder has no chat template\nerror: and nothing else\n"
