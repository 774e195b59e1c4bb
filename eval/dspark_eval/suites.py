"""Prompt sets by name, or from any JSONL file.

The shipped held-out prompts of the nano target come as two sets, since how predictable a text is
decides how much of a draft is accepted: word problems with a worked solution, and plain
instructions, told apart by the family each row names. A third set is written on the spot, as large
as asked for: the validation split that its generator keeps apart from training and test. It is for
fitting, so that what ships stays unseen until it is measured.

`code` asks for small Python functions, with tests: for targets that can write Python, which the
nano target cannot.

The public sets (`public_sets.py`) are read from a local folder, or fetched.

`nano-long` and `nano-padded` ask the shipped problems behind long contexts (`long_context.py`): a
set for each length, of the same questions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.assets import asset
from dspark.distill.messages import user_turn
from dspark.distill.prompts import PromptRow, read_prompts
from dspark.errors import UserError
from dspark.nano.generate import row as nano_row
from dspark.nano.instructions import FAMILIES as INSTRUCTIONS
from dspark.wording import counted
from dspark_eval.long_context import CHAT, LENGTHS, PADDED, LongContext
from dspark_eval.public_sets import PUBLIC_SETS, Grader, read_public

_NANO_FILE = "prompts/test.jsonl"
_CODE_FILE = "prompts/code.jsonl"


def _is_instruction(row: PromptRow) -> bool:
    return row.metadata.get("family") in {family.name for family in INSTRUCTIONS}


def _is_problem(row: PromptRow) -> bool:
    return not _is_instruction(row)


_NANO_SETS: dict[str, Callable[[PromptRow], bool]] = {
    "nano-problems": _is_problem,
    "nano-instructions": _is_instruction,
}
VALIDATION = "nano-validation"
_LONG_SETS = {
    name: {f"{name}-{tokens}": LongContext(kind, tokens) for tokens in LENGTHS}
    for name, kind in (("nano-long", CHAT), ("nano-padded", PADDED))
}
_LONG = {name: context for contexts in _LONG_SETS.values() for name, context in contexts.items()}
CODE = "code"
SUITE_NAMES = ("nano", *_NANO_SETS, VALIDATION, *_LONG_SETS, CODE, *PUBLIC_SETS)
USUAL_PROMPTS = 100
"""Of a set whose size no protocol says."""


@dataclass(frozen=True)
class Suite:
    """Prompts that are reported together.

    available  rows they were drawn from
    notes      what the reader of the file had to say (skipped lines)
    context    what stands before each prompt
    grader     how a row's `answer` is judged
    """

    name: str
    rows: tuple[PromptRow, ...]
    available: int
    notes: tuple[str, ...] = ()
    context: LongContext | None = None
    grader: Grader = "exact"

    @property
    def first_turn_note(self) -> list[str]:
        """For who asks the first turn alone: a sentence if some rows have more."""
        more = sum(bool(row.later_turns) for row in self.rows)
        said = f"{self.name}: {counted(more, 'prompt')} with later turns: only the first is asked"
        return [said] if more else []


def load_suites(
    name: str | Path, *, n_prompts: int | None, seed: int, folder: Path | None = None
) -> list[Suite]:
    """The sets behind a suite name ("nano" is two, "nano-long" one for each length) or the one in
    a JSONL file.

    At most `n_prompts` rows of each, drawn without replacement by `seed`: files tend to be sorted
    by topic, so the first rows of one are no sample of it. None: as many as the DSpark paper
    measures of a public set, `USUAL_PROMPTS` of another. `folder` holds files of public sets.

    Raises `UserError` for a name that is neither, and for what `read_prompts` refuses.
    """
    if str(name) in PUBLIC_SETS:
        return [_public(str(name), n_prompts, seed, folder)]
    n_prompts = USUAL_PROMPTS if n_prompts is None else n_prompts
    if str(name) == CODE:
        rows = read_prompts([asset(_CODE_FILE)], strict=True).rows
        return [_suite(CODE, rows, n_prompts, seed)]
    if str(name) == VALIDATION:
        return [_validation(n_prompts, seed)]
    if str(name) in _LONG_SETS or str(name) in _LONG:
        contexts = _LONG_SETS.get(str(name)) or {str(name): _LONG[str(name)]}
        (asked,) = load_suites("nano-problems", n_prompts=n_prompts, seed=seed)
        return [replace(asked, name=label, context=found) for label, found in contexts.items()]
    if str(name) in SUITE_NAMES:
        rows = read_prompts([asset(_NANO_FILE)], strict=True).rows
        wanted = _NANO_SETS if name == "nano" else {str(name): _NANO_SETS[str(name)]}
        return [
            _suite(label, tuple(filter(keep, rows)), n_prompts, seed)
            for label, keep in wanted.items()
        ]
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"{name}: neither a suite ({', '.join(SUITE_NAMES)}) nor a JSONL file with "
            "`prompt`, `turns` or `messages` in each line"
        )
    prompts = read_prompts([path])
    notes = (f"{path}: {prompts.report.summary()}",) if prompts.report.skipped else ()
    suite = _suite(path.stem, prompts.rows, n_prompts, seed, notes)
    return [replace(suite, notes=(*notes, *_repeated(suite)))]


def _repeated(suite: Suite) -> list[str]:
    """A sentence if some rows ask the same: they count as if they were other prompts."""
    asked = Counter(str((row.prompt, row.later_turns)) for row in suite.rows)
    more = sum(asked.values()) - len(asked)
    said = f"{suite.name}: {counted(more, 'prompt')} asked before: each counts again"
    return [said] if more else []


def load_all_suites(
    names: Sequence[str | Path], *, n_prompts: int | None, seed: int, folder: Path | None = None
) -> list[Suite]:
    """`load_suites` of each name. Raises `UserError` also where two sets would share a name: what
    is said of the one would be taken for the other."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--suite-dir {folder}: expected a folder with NAME.jsonl in it")
    suites = [
        suite
        for name in names
        for suite in load_suites(name, n_prompts=n_prompts, seed=seed, folder=folder)
    ]
    twice = [name for name, n in Counter(suite.name for suite in suites).items() if n > 1]
    if twice:
        raise UserError(f"--suite: two sets are called {twice[0]}; rename one, or give it once")
    return suites


def _public(name: str, count: int | None, seed: int, folder: Path | None) -> Suite:
    found, chosen = read_public(name, folder), PUBLIC_SETS[name]
    suite = _suite(name, found.rows, count or chosen.size, seed, found.notes)
    return replace(suite, grader=chosen.grader)


def _validation(count: int, seed: int) -> Suite:
    """`count` different questions of the generator's validation split; `seed` decides which."""
    rows: dict[str, PromptRow] = {}
    index = 0
    while len(rows) < count:
        made = nano_row(seed, index, "validation")
        question = made.messages[0]["content"]
        facts = {"family": made.family} | ({} if made.answer is None else {"answer": made.answer})
        index += 1
        rows.setdefault(question, PromptRow(VALIDATION, index, user_turn(question), facts))
    return Suite(VALIDATION, tuple(rows.values()), count)


def draw_rows(rows: tuple[PromptRow, ...], count: int, seed: int) -> tuple[PromptRow, ...]:
    """The first `count` rows of the order that `seed` decides; a smaller draw is its prefix."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return tuple(shuffled[:count])


def _suite(
    name: str, rows: tuple[PromptRow, ...], count: int, seed: int, notes: tuple[str, ...] = ()
) -> Suite:
    if not rows:
        raise UserError(f"{name}: the prompt file has no such rows")
    return Suite(name, draw_rows(rows, count, seed), len(rows), notes)
