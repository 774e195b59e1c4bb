"""Does a program that a model wrote pass its tests? Run in a process of its own, within limits.

    program = setup + code of the answer + tests

The answer's code is its first fenced Python block that defines something, else its first block;
without a block the whole text, if it defines something. It passes if the process ends with status
0 and a nonce is printed last, which the process that runs the program does once the tests are
through (`code_child`): code that leaves early does not pass. The nonce stands in no file, argument
or environment; code that searches the interpreter's frames for it would find it.

Limits: wall clock and CPU seconds, address space, size of files, processes, no core dump; an empty
environment, an empty folder that is removed, no input. Whatever the program started is killed at
its end: on Linux all its descendants, sessions of their own or not, elsewhere its process group.
(A program that kills the process that watches it dies with it, but not what it started.)
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

_CHILD = Path(__file__).with_name("code_child.py")
_PATIENCE = 15
"""Seconds beyond its limit after which the watching process itself is given up."""
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
    program = f"{setup}\n{code}\n{renamed}\n{tests}\n"
    with tempfile.TemporaryDirectory() as folder:
        return _run(program, nonce, Path(folder), limits or Limits())


def _run(program: str, nonce: str, folder: Path, limits: Limits) -> Result:
    work = folder / "work"
    work.mkdir()
    path, output = work / "program.py", folder / "output.txt"
    path.write_text(program, encoding="utf-8")
    numbers = (limits.seconds, limits.memory, limits.file_bytes, limits.processes)
    process = subprocess.Popen(
        [sys.executable, "-I", str(_CHILD), *map(str, (*numbers, path, output))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=work,
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = process.communicate(f"{nonce}\n", timeout=limits.seconds + _PATIENCE)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        _end(process)
    # which of the two signals, the kernel decides
    if said.strip() in ("timeout", str(-signal.SIGXCPU), str(-signal.SIGKILL)):
        return "timeout"
    written = output.read_bytes().decode(errors="replace") if output.exists() else ""
    return "passed" if said.strip() == "0" and nonce in written.splitlines()[-1:] else "failed"


def _end(process: subprocess.Popen[str]) -> None:
    """End the watching process, should it still run (after Ctrl-C, say), and by it the program,
    which has a session of its own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    with suppress(ProcessLookupError, PermissionError):  # gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
