"""Does a program that a model wrote pass its tests? Run in a process of its own, within limits.

    program = setup + code of the answer + tests + print(nonce)

The answer's code is its first fenced Python block that defines something, else its first block;
without a block the whole text, if it defines something. It passes if the process ends with status
0 and prints the nonce last, which comes after the tests: code that leaves early does not pass.

Limits: wall clock and CPU seconds, address space, size of files, processes, no core dump; an empty
environment, an empty folder that is removed, no input, a process group that is killed as a whole.
The kernel counts processes by user and lets root have any number.
THIS IS NO SANDBOX: the code can read what this user can read and use the network. It runs only
where it is asked for (`--run-code`), and belongs in a container or a virtual machine.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Result = Literal["passed", "failed", "timeout", "no code"]

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "py", "python", "python3")


@dataclass(frozen=True)
class Limits:
    """Of one program: wall-clock seconds (CPU seconds likewise), bytes of memory and of files,
    processes of this user."""

    seconds: int = 10
    memory: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 64


def answer_code(text: str) -> str | None:
    """The Python in an answer; None if there is none that parses."""
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _PYTHON]
    parsed = [code for code in blocks or [text] if _parses(code)]
    defining = [code for code in parsed if _functions(code)]
    # a text without a block is code only if it defines something: "Yes" would parse too
    return next(iter(defining or (parsed if blocks else [])), None)


def _parses(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return False


def _functions(code: str) -> list[str]:
    """Names of the functions and classes that the top level defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(code).body if isinstance(node, kinds)]


def run_tests(
    text: str, tests: str, *, setup: str = "", entry_point: str = "", limits: Limits | None = None
) -> Result:
    """Run the code in an answer against `tests`, source that raises if it is wrong.

    setup runs before the answer's code (imports, a stub that it may complete). entry_point is the
    name that the tests call: where the answer defines a single function under another name (the
    question did not give one), that function is called.
    """
    code = answer_code(text)
    if code is None:
        return "no code"
    names = _functions(code)
    renamed = ""
    if entry_point and entry_point not in names and len(names) == 1:
        renamed = f"{entry_point} = {names[0]}\n"
    nonce = secrets.token_hex(16)
    program = f"{setup}\n{code}\n{renamed}\n{tests}\nprint({nonce!r})\n"
    with tempfile.TemporaryDirectory() as folder:
        return _run(program, nonce, Path(folder), limits or Limits())


def _run(program: str, nonce: str, folder: Path, limits: Limits) -> Result:
    path, output = folder / "program.py", folder / "output.txt"
    path.write_text(program, encoding="utf-8")
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LIMITED, *map(str, _numbers(limits)), str(path)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _kill_group(process)
    said = output.read_bytes().decode(errors="replace")
    if status in (-signal.SIGXCPU, -signal.SIGKILL):  # which of them, the kernel decides
        return "timeout"
    return "passed" if status == 0 and nonce in said.splitlines()[-1:] else "failed"


def _numbers(limits: Limits) -> tuple[int, int, int, int]:
    return limits.seconds, limits.memory, limits.file_bytes, limits.processes


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):  # all gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Limits are set in the child, before the program: nothing runs between fork and exec in ours.
_LIMITED = """
import resource, runpy, sys
seconds, memory, size, processes = map(int, sys.argv[1:5])
for name, value in (
    ("RLIMIT_CPU", seconds), ("RLIMIT_AS", memory), ("RLIMIT_FSIZE", size),
    ("RLIMIT_NPROC", processes), ("RLIMIT_CORE", 0),
):
    kind = getattr(resource, name, None)
    if kind is None:
        continue
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
sys.argv = [sys.argv[5]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
