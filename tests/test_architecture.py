"""The rules of the house, read from the source: layers, lazy imports, sizes, names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ROOTS = {
    "dspark": REPO / "dspark",
    "dspark_kernels": REPO / "kernels" / "dspark_kernels",
    "dspark_eval": REPO / "eval" / "dspark_eval",
}
OURS = tuple(ROOTS)
# What a user who only decodes need not have in memory.
HEAVY = ("accelerate", "datasets", "matplotlib", "torch_pruning", "triton")
FILE_LINES = {"dspark": 300, "dspark_eval": 300, "dspark_kernels": 350}
FUNCTION_LINES = 60
NESTING = 4
VAGUE_NAMES = {"common.py", "helper.py", "helpers.py", "misc.py", "util.py", "utils.py"}

# (importing module starts with, forbidden import starts with); a prefix matches whole names.
FORBIDDEN = [
    ("dspark_kernels", "dspark"),
    ("dspark_kernels", "dspark_eval"),
    *((layer, "dspark.runtime") for layer in ("dspark.k3", "dspark.draft")),
    *((layer, "dspark.distill") for layer in ("dspark.k3", "dspark.draft", "dspark.runtime")),
    ("dspark.k3", "dspark.draft"),
    *(
        (f"dspark.{part}", command_line)
        for part in ("k3", "draft", "runtime", "distill", "interop", "nano")
        for command_line in ("dspark.cli", "dspark.commands", "dspark.generation")
    ),
    ("dspark.generation", "dspark.commands"),
    *(("dspark.interop", layer) for layer in ("dspark.runtime", "dspark.distill")),
    *((layer, "dspark.interop") for layer in ("dspark.k3", "dspark.draft", "dspark.runtime")),
]


@dataclass(frozen=True)
class Import:
    """One imported module; `lazy` if it happens inside a function."""

    module: str
    lazy: bool
    line: int


@dataclass(frozen=True)
class Source:
    """One of our files: its dotted name and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    def imports(self) -> Iterator[Import]:
        """Every import with its full dotted target, `from a import b` as `a.b`."""
        yield from _imports(self.tree, lazy=False)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue  # a name for the type checker makes nothing depend on anything
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, lazy, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", lazy, child.lineno)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, lazy or inside)


def _sources() -> list[Source]:
    found = []
    for name, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            parts = [name, *path.relative_to(root).with_suffix("").parts]
            text = path.read_text(encoding="utf-8")
            dotted = ".".join(part for part in parts if part != "__init__")
            found.append(Source(dotted, path, text, ast.parse(text)))
    return found


SOURCES = _sources()
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)


def _inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def test_all_three_packages_are_seen() -> None:
    assert {source.package for source in SOURCES} == set(OURS)


@every_source
def test_layers(source: Source) -> None:
    for found in source.imports():
        for layer, forbidden in FORBIDDEN:
            if _inside(source.name, layer):
                assert not _inside(found.module, forbidden), (
                    f"{source.path.name}:{found.line}: {layer} must not import {forbidden}"
                )


@every_source
def test_one_switch_for_kernels(source: Source) -> None:
    if source.name == "dspark.ops" or source.package == "dspark_kernels":
        return
    bad = [found for found in source.imports() if _inside(found.module, "dspark_kernels")]
    assert not bad, "kernels are reached through dspark.ops only"


@every_source
def test_only_the_command_line_imports_evaluation_and_lazily(source: Source) -> None:
    if source.package == "dspark_eval":
        return
    for found in source.imports():
        if _inside(found.module, "dspark_eval"):
            assert _inside(source.name, "dspark.commands"), f"line {found.line}: only a command may"
            assert found.lazy, f"line {found.line}: inside the command, not at the top"


@every_source
def test_heavy_packages_are_imported_where_they_are_used(source: Source) -> None:
    if source.package != "dspark":
        return  # the other two are themselves loaded when they are used
    for found in source.imports():
        if any(_inside(found.module, heavy) for heavy in HEAVY):
            assert found.lazy, f"{source.path.name}:{found.line}: import it inside the function"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import dspark", (*HEAVY, "torch", "transformers")),
        ("import dspark.cli", (*HEAVY, "torch", "transformers")),
        ("import dspark.k3.model, dspark.draft.model, dspark.runtime.decode", HEAVY),
        ("import dspark.distill.config, dspark.distill.loss", HEAVY),
        ("import dspark.doctor", HEAVY),
    ],
)
def test_importing_stays_light(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(*[n for n in {absent!r} if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={"PYTHONPATH": ":".join(map(str, (REPO, REPO / "kernels", REPO / "eval")))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@every_source
def test_size_law(source: Source) -> None:
    lines = source.text.count("\n")
    assert lines <= FILE_LINES[source.package], f"{lines} lines: more than one idea"
    for function in source.functions():
        length = _body_lines(function)
        assert length <= FUNCTION_LINES, f"{function.name}: {length} lines"
        depth = _nesting(function.body)
        assert depth < NESTING, f"{function.name}: nested {depth} deep"


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: a long signature or docstring explains, it does not complicate."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _nesting(statements: list[ast.stmt]) -> int:
    """Depth of control flow; `elif` is no deeper than its `if`, a nested function starts anew."""
    deepest = 0
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        blocks = _blocks(statement)
        if blocks:
            deepest = max(deepest, 1 + max(map(_nesting, blocks)))
        if isinstance(statement, ast.If):
            chained = len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
            deepest = max(deepest, _nesting(statement.orelse) + (0 if chained else 1))
    return deepest


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [statement.body] if hasattr(statement, "body") else []
    if not isinstance(statement, ast.If):
        blocks += [getattr(statement, name, []) for name in ("orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    return [block for block in blocks if block]


def test_nesting_is_counted_right() -> None:
    code = "for a in b:\n  if c:\n    pass\n  elif d:\n    pass\n  else:\n    with e:\n      pass"
    assert _nesting(ast.parse(code).body) == 3
    assert _nesting(ast.parse("x = 1").body) == 0
    assert _nesting(ast.parse("try:\n  pass\nfinally:\n  while a:\n    pass").body) == 2


@every_source
def test_names_say_something_and_files_explain_themselves(source: Source) -> None:
    assert source.path.name not in VAGUE_NAMES
    assert ast.get_docstring(source.tree), "a file opens with its one idea"
    if source.text.count("\n") > 5 and source.path.name != "__init__.py":
        assert "from __future__ import annotations" in source.text


@every_source
def test_public_functions_take_no_kwargs(source: Source) -> None:
    """But for those of a wrapper whose signature is the wrapped function's (`P.kwargs`)."""
    for function in source.functions():
        kwarg = function.args.kwarg
        if kwarg is None or function.name.startswith("_"):
            continue
        if kwarg.annotation is None or ast.unparse(kwarg.annotation) != "P.kwargs":
            pytest.fail(f"{function.name}(**{kwarg.arg})")
