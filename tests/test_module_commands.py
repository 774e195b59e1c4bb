"""Measurements that are run as modules end as `dspark` does: one line and 2 for a wrong input."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark import console
from dspark.errors import UserError

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__main__")
    for source in (ROOT, ROOT / "eval")
    for package in ("dspark", "dspark_eval")
    for path in (source / package).rglob("*.py")
    if "console import" in (text := path.read_text("utf-8")) and "Parser(" in text
)


def main_of(name: str) -> console.ModuleCommand:
    module = importlib.import_module(name)
    if not hasattr(module, "main"):
        module = importlib.import_module(f"{name}.__main__")
    command: console.ModuleCommand = module.main
    return command


def test_they_are_found() -> None:
    assert {"dspark_eval.projection", "dspark_eval.policies", "dspark.nano.train"} <= set(MODULES)
    assert len(MODULES) >= 17


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_option_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_of(name)(["--no-such-option"])
    told = capsys.readouterr()
    assert (ended.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith("error: ")
    assert told.err.endswith(f"(see `python -m {name} --help`)\n")


@pytest.mark.parametrize("name", MODULES)
def test_a_seed_beyond_63_bits_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_of(name)(["--help"])
    if "--seed " not in capsys.readouterr().out:
        pytest.skip("draws nothing")
    for seed, expected in ((2**63, f"got {2**63}"), (-1, "got -1"), ("x", "a whole number")):
        with pytest.raises(SystemExit) as ended:
            main_of(name)([f"--seed={seed}"])
        told = capsys.readouterr()
        assert (ended.value.code, told.out, told.err.count("\n")) == (2, "", 1)
        assert "argument --seed: expected" in told.err
        assert expected in told.err


@pytest.mark.parametrize("name", MODULES)
def test_help_names_the_command_as_it_is_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main_of(name)(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {name} ")


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (UserError("a.json:3: expected\na number"), 2, "error: a.json:3: expected a number\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "error: a: No such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_a_module_ends(
    raised: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @console.module_command
    def main(arguments: Sequence[str]) -> None:
        raise raised

    assert main([]) == code
    assert capsys.readouterr().err == told


def test_an_own_exit_code_stays_and_a_defect_keeps_its_traceback() -> None:
    assert console.module_command(lambda arguments: len(arguments))(["one"]) == 1
    assert console.module_command(lambda arguments: None)([]) == 0
    with pytest.raises(ZeroDivisionError):
        console.module_command(lambda arguments: 1 // 0)([])


def test_a_table_of_nothing_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mistyped"
    assert main_of("dspark_eval.real_text")(["table", str(out)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"error: {out}: no drafter was trained yet")
    assert not out.exists()
