"""How a command line ends: exit code and at most one line on stderr.

    0    done                          2    wrong option or input (`UserError`)
    1    the command's own verdict     130  Ctrl-C; the line says how to go on

Anything else is a defect of ours and keeps its traceback. A warning is one line too, without the
place in the code that gave it. Measurements that are modules (`python -m dspark_eval.NAME`) end the
same way: `Parser` has their options, `module_command` their main function.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, NoReturn, Protocol, TextIO

import typer

from dspark.errors import UserError

# typer may carry its own copy of click: the class is taken from what typer itself exports.
_UsageError: Any = typer.BadParameter.__base__

# Options that take several values after one name (`--prompts a.jsonl b.jsonl`, so that a shell
# pattern works), which click only knows as a repeated option. By command: where an option takes one
# value, a second one must stay an error and not replace the first.
_SPREAD = {
    "distill": ("--prompts", "--set"),
    "eval": ("--suite", "--prompts", "--compare", "--concurrency"),
    "bench": ("--temperature",),
    "prune": ("--prompts", "--set"),
    "calibrate": ("--suite", "--prompts", "--temperature"),
    "study": ("--arm", "--set", "--contexts"),
    "generate": ("--stop", "--logit-bias"),
}


def run(app: typer.Typer, args: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    for name, value in pairwise(args):
        if not value:  # as a path it would mean the folder one stands in
            what = name if name.startswith("-") else f"argument after {name}"
            return _fail(f"{what}: got an empty value; is a shell variable unset?")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            typed = shlex.join(["dspark", *args])  # commands find it as their context's `obj`
            code = app(spread_values(args), prog_name="dspark", standalone_mode=False, obj=typed)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(args)
    except _UsageError as error:
        return _usage(error)
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if not error.filename or not error.strerror:  # not about a file: ours to mend
            raise
        return _fail(f"{error.filename}: {error.strerror}")
    # typer turns Ctrl-C inside a command into this exit code
    return _interrupted(args) if code == 130 else int(code or 0)


class Parser(argparse.ArgumentParser):
    """Options of a module; a wrong one is one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_fail(f"{message} (see `{self.prog} --help`)"))


class ModuleCommand(Protocol):
    """Arguments, else those of the process, to an exit code."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def module_command(main: Callable[[Sequence[str]], int | None]) -> ModuleCommand:
    """`main` of a module, ending as `dspark` does; None in place of an exit code is 0."""

    @wraps(main)
    def command(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if arguments is None else arguments) or 0
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            return 130
        except UserError as error:
            return _fail(str(error))
        except OSError as error:
            if not error.filename or not error.strerror:
                raise
            return _fail(f"{error.filename}: {error.strerror}")

    return command


def spread_values(args: Sequence[str]) -> list[str]:
    """Turn `--prompts a b` into `--prompts a --prompts b`; bare arguments come before options."""
    several = _SPREAD.get(args[0], ()) if args else ()
    spread: list[str] = []
    name = ""
    for arg in args:
        if arg.startswith("-"):
            name = arg if arg in several else ""
        elif name and spread[-1] != name:
            spread.append(name)
        spread.append(arg)
    return spread


def _usage(error: Any) -> int:
    message = error.format_message()
    if not message:  # a bare `dspark`: its help is on the screen already
        return 2
    command = error.ctx.command_path if error.ctx else "dspark"
    return _fail(f"{message} (see `{command} --help`)")


def _fail(message: str) -> int:
    typer.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo(" ".join(message.split()), err=True)
    return 2


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`: what is said, and not which line of ours says it."""
    kind = "warning" if category is UserWarning else category.__name__
    typer.echo(f"{kind}: {' '.join(str(message).split())}", file=file, err=file is None)


def _interrupted(args: Sequence[str]) -> int:
    command = shlex.join(["dspark", *args])
    if args[:1] in (["distill"], ["prune"]):
        again = command if "--resume" in args else f"{command} --resume"
        typer.echo(f"interrupted; to go on from the last checkpoint: {again}", err=True)
    elif args[:1] == ["study"]:
        typer.echo(f"interrupted; what is finished is kept, to go on: {command}", err=True)
    elif args[:1] == ["generate"]:
        typer.echo("interrupted; what was generated is above", err=True)
    else:
        typer.echo(f"interrupted; nothing was kept, to start again: {command}", err=True)
    return 130
