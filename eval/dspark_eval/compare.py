"""`dspark eval --compare A B C`: several ways to decode, side by side on the same prompts.

Every contender answers every prompt with the same seed, and who goes first changes from prompt to
prompt. Plain decoding is always among them: it says what a token costs, and at temperature 0 what
the tokens are.

    ratio        accepted length over that of the first contender, prompts resampled in pairs
    speed-up     tokens per second over those of plain decoding, in pairs too
    mismatches   answers at temperature 0 that are not plain decoding's, token for token
    lossless     every text read again by the target: drawn from its law? (`compare_figures.py`)

The intervals are about prompts (`intervals.py`). Only first turns are asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from dspark.devices import find_device
from dspark.distill.chat import ChatFormat, RowError
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, prepared_folder
from dspark.runtime.asked import check_max_new_tokens
from dspark.runtime.judge import Method
from dspark.runtime.loading import load_target
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval import metrics
from dspark_eval.asked import Decoding
from dspark_eval.busy import say_if_busy
from dspark_eval.compare_figures import held_against_the_law, summaries
from dspark_eval.compare_table import markdown, print_comparison
from dspark_eval.contenders import (
    BLOCK_KINDS,
    LOOKUP,
    MODEL,
    PLAIN,
    Contender,
    chat_of,
    open_contender,
    own_warnings,
)
from dspark_eval.environment import describe_environment
from dspark_eval.fidelity import fidelity_warnings
from dspark_eval.long_context import prompts_in_context
from dspark_eval.measured_files import drafter_files, target_files
from dspark_eval.protocols import Measured, departures, protocol_document
from dspark_eval.report import progress
from dspark_eval.speed import Decode, hash_tokens
from dspark_eval.suites import Suite, load_all_suites

COMPARE_FILE, TABLE_FILE = "compare.json", "compare.md"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Decoding):
    """One call. `contenders`: see `contenders.py`; the first is what others are compared with.

    draft_length: None: each its own block. n_prompts, suite_dir: see `load_suites`. out: folder for
    compare.json and compare.md. protocol: whose settings these are, said with the numbers.
    command: the command line, kept beside them.
    Raises UserError for what cannot be compared.
    """

    contenders: tuple[str, ...]
    suites: tuple[str, ...] = ("nano",)
    n_prompts: int | None = 100
    draft_length: int | None = None
    verification: str = "token"
    temperature: float = 0.0
    out: Path | None = None
    suite_dir: Path | None = None
    protocol: str | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        names = self.contenders
        if len(names) < 2:
            raise UserError(f"--compare: expected two or more; got {len(names)}")
        places = {Path(name).resolve() if Path(name).is_dir() else name for name in names}
        if len(places) != len(names):
            raise UserError(f"--compare: each once; got {', '.join(names)}")
        if names[0] == PLAIN:
            raise UserError("--compare plain ...: expected a drafter first, the others' reference")
        self.check()
        if self.draft_length is not None and self.draft_length < 1:
            raise UserError(f"--draft-length: expected 1 or more; got {self.draft_length}")
        if self.verification not in get_args(Method):
            expected = " or ".join(get_args(Method))
            raise UserError(f"--verification: expected {expected}; got {self.verification!r}")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Of target and drafters alike."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    @property
    def method(self) -> Method:
        return "block" if self.verification == "block" else "token"


@dataclass(frozen=True)
class Compared:
    """Contenders and prompts, loaded: `prompts` by suite; `unread`: suites whose contexts are too
    long for the target to read every text again."""

    target: Target
    contenders: tuple[Contender, ...]
    prompts: Mapping[str, list[list[int]]]
    warnings: tuple[str, ...]
    unread: frozenset[str] = frozenset()
    identity: Mapping[str, Any] | None = None


def run_compare(options: CompareOptions) -> dict[str, Any]:
    """Compare; print the table, and write compare.json and compare.md into `out`."""
    loaded = load_all(options)
    out = options.out
    with nullcontext() if out is None else prepared_folder(out, f"--out {out}"):
        say_if_busy()
        document = compare_all(loaded, options)
        if out is not None:
            atomic_write_json(out / COMPARE_FILE, document)
            atomic_write_text(out / TABLE_FILE, markdown(document))
    if not options.quiet:
        print_comparison(document)
    return document


def load_all(options: CompareOptions) -> Compared:
    """Everything that can be refused, before anything is measured.

    Raises UserError for what `load_suites`, `load_target` and `open_contender` refuse, and with
    file and line where the chat template refuses a prompt.
    """
    suites = load_all_suites(
        options.suites, n_prompts=options.n_prompts, seed=options.seed, folder=options.suite_dir
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = find_device(options.device, "--device")
    loaded = load_target(options.target, dtype=getattr(torch, options.dtype), device=device)
    check_max_new_tokens(options.max_new_tokens, loaded.target)
    names = options.contenders
    if PLAIN not in names:
        names = (*names, PLAIN)
    opened = tuple(open_contender(name, loaded, options.draft_length) for name in names)
    for contender in opened:  # a draft length beyond a block
        _decode(contender, loaded.target, options)
    chat, warnings = chat_of(options.contenders, loaded)
    warnings += [f"{who.name}: {text}" for who in opened for text in own_warnings(who)]
    warnings += [
        f"{s.name}: {text}" for s in suites for text in metrics.sample_size_warnings(len(s.rows))
    ]
    warnings += [note for s in suites for note in (*s.notes, *s.first_turn_note)]
    prompts = {suite.name: _prompt_ids(chat, suite) for suite in suites}
    unread = frozenset(suite.name for suite in suites if suite.context)
    identity = target_files(loaded.path, loaded.tokenizer)
    return Compared(loaded.target, opened, prompts, tuple(warnings), unread, identity)


def _prompt_ids(chat: ChatFormat, suite: Suite) -> list[list[int]]:
    ids, place = [], prompts_in_context(chat, suite.context)
    for row in suite.rows:
        try:
            ids.append(place(row.prompt))
        except RowError as problem:
            raise UserError(f"{row.file}:{row.line}: {problem}; fix or drop the line") from None
    return ids


def compare_all(loaded: Compared, options: CompareOptions) -> dict[str, Any]:
    """The JSON document: the setting, the contenders, and each suite by name."""
    results, alarms = {}, []
    for suite, prompts in loaded.prompts.items():
        answers = decode_all(loaded, suite, prompts, options)
        sampling, seed = options.sampling(), options.seed
        entries = summaries(loaded.contenders, answers, sampling, seed=seed)
        judged: Sequence[dict[str, Any] | None] = [None] * len(entries)
        if suite not in loaded.unread:
            judged = held_against_the_law(
                loaded.target, prompts, answers, sampling, seed=seed, sets=len(loaded.prompts)
            )
        for entry, found in zip(entries, judged, strict=True):
            entry["lossless"] = found
            alarms += [f"{suite}, {entry['name']}: {s}" for s in fidelity_warnings(found)]
        results[suite] = {
            "n_prompts": len(prompts),
            "prompts_sha256": hash_tokens(prompts),
            "contenders": entries,
        }
    measured = Measured(
        {c.name: c.block_size for c in loaded.contenders if c.kind in BLOCK_KINDS},
        {suite: len(prompts) for suite, prompts in loaded.prompts.items()},
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "comparison",
        "target": loaded.target.name,
        "reference": loaded.contenders[0].name,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "max_new_tokens": options.max_new_tokens,
        "draft_length": options.draft_length,
        "verification": options.verification,
        "seed": options.seed,
        "protocol": protocol_document(options.protocol, options, measured),
        "contenders": [_facts(contender) for contender in loaded.contenders],
        "suites": results,
        "warnings": [*alarms, *departures(options.protocol, options, measured), *loaded.warnings],
        "command": options.command,
        "identity": {"target": loaded.identity},
        "environment": describe_environment(loaded.target.device, loaded.target.dtype),
    }


def _facts(contender: Contender) -> dict[str, Any]:
    """What a contender is; `identity` of its files, null for one without a folder."""
    folder = Path(contender.name.removeprefix(MODEL))
    here = contender.kind not in (PLAIN, LOOKUP) and folder.is_dir()
    return {**contender.facts(), "identity": drafter_files(folder) if here else None}


def _decode(contender: Contender, target: Target, options: CompareOptions) -> Decode:
    return contender.decode(
        target,
        options.sampling(),
        max_new_tokens=options.max_new_tokens,
        draft_length=options.draft_length,
        method=options.method,
    )


def decode_all(
    loaded: Compared, suite: str, prompts: Sequence[list[int]], options: CompareOptions
) -> list[list[Generation]]:
    """Answers by contender and prompt; who goes first changes from prompt to prompt."""
    ways = [_decode(contender, loaded.target, options) for contender in loaded.contenders]
    for way in ways:  # once, so that nobody pays for what is made on first use
        way(prompts[0], options.seed)
    answers: list[list[Generation]] = [[] for _ in ways]
    with progress(f"compare {suite}", len(prompts), options.quiet) as advance:
        for index, prompt in enumerate(prompts):
            order = [(index + turn) % len(ways) for turn in range(len(ways))]
            for at in order:
                answers[at].append(ways[at](prompt, options.seed + index))
            advance()
    for contender, own in zip(loaded.contenders, answers, strict=True):
        for answer in own if contender.kind != PLAIN else ():
            metrics.check_generation(answer)
    return answers
