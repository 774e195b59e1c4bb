"""One call of `dspark generate`: load, decode, show, and say how it went.

stdout has the text (with --show-draft its marks, with --json one document); everything about it,
the round table too, goes to stderr, so that a pipe or a file gets the text alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dspark.devices import find_device
from dspark.distill.chat import ChatFormat
from dspark.distill.fingerprint import check_stored_tokenizer
from dspark.distill.identity import identity_warnings, trained_format
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.golden_check import golden_warnings
from dspark.draft.model import DSparkDrafter
from dspark.files import prepare_folder
from dspark.fitting import say, show
from dspark.generation.account import SCHEMA_VERSION, Account
from dspark.generation.asked import endings, prompt_ids, read_prompt, rules_of
from dspark.generation.frames import by_frames, told
from dspark.generation.options import GenerateOptions
from dspark.generation.reader import Piece, Reader
from dspark.generation.screen import PICTURE_WIDTH, Marked, Plain, Silent
from dspark.reading import reading_bar
from dspark.runtime.asked import check_draft_length, check_max_new_tokens, room_for
from dspark.runtime.cost_model import (
    COST_MODEL_FILE,
    FRAME_COSTS_FILE,
    CostModel,
    load_cost_model,
)
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies.choose import make_policy
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.prefill import too_long_note
from dspark.runtime.records import Emitted, Generation
from dspark.runtime.requests import RoundCallback
from dspark.runtime.stops import StopStrings
from dspark.runtime.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Loaded:
    """Target, tokenizer and chat format (None: --raw), and a drafter if there is one."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat | None
    drafter: DSparkDrafter | None
    warnings: tuple[str, ...]


def run_generate(options: GenerateOptions, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """Generate and show one answer; returns the JSON document of it.

    `remarks`, and what a user should know of the drafter, are said when the first token is there:
    nothing is refused any more, so that an error stands alone.
    Ctrl-C while tokens come ends the text there (`finish` is then "interrupted").
    Raises UserError for whatever cannot be loaded or decoded.
    """
    prompt = read_prompt(options.prompt)
    if options.svg is not None:
        prepare_folder(options.svg.parent)
    loaded = load(options)
    notes = Console(stderr=True, highlight=False, markup=False)
    if not notes.is_terminal:
        notes.width = PICTURE_WIDTH
    ids = prompt_ids(prompt, loaded.tokenizer, loaded.chat, options.system)
    stops, ends = endings(options.stop, loaded.tokenizer, loaded.target.end_token_ids)
    screen = _screen(options)
    stop = StopStrings(stops, loaded.tokenizer)
    reader = Reader(stop.start(min_new_tokens=options.min_new_tokens), ends, screen.show)
    beyond = too_long_note(loaded.target, len(ids) + options.max_new_tokens)
    frames = _frames(options, loaded, len(ids))
    warnings = [*loaded.warnings, *([beyond] if beyond else [])]
    if frames is not None and not frames.turns.recorded:
        warnings.append("--graphs: this device records no frames; unrecorded ones ran")
    unsaid = [f"note: {remark}" for remark in (*remarks, *warnings)]

    def read(emitted: Sequence[Emitted]) -> None:
        while unsaid:
            say(notes, unsaid.pop(0))
        reader.read(emitted)

    account = _decode(options, loaded, frames, ids, stop, ends, read)
    reader.finish()
    account = account or Account.interrupted(reader.pieces)
    screen.finish()
    if options.stats:
        for part in account.parts():
            if isinstance(part, str):
                say(notes, part)
            else:
                show(notes, part)
    if isinstance(screen, Marked) and options.svg is not None:
        screen.picture(options.svg, options.command(), account.parts() if options.stats else ())
    document = {
        **_document(options, loaded, frames, prompt, ids, reader, account),
        "warnings": warnings,
    }
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return document


def load(options: GenerateOptions) -> Loaded:
    """Target and drafter, checked against each other; raises UserError."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = find_device(options.device, "--device")
    dtype = getattr(torch, options.dtype)
    # the drafter's config first: it costs nothing, a large target takes a minute
    config = None if options.draft is None else read_config(options.draft)
    if config is not None:
        check_draft_length(options.draft_length, config.block_size)
    found = load_target(options.target, dtype=dtype, device=device)
    if options.draft is None or config is None:
        chat = None if options.raw else ChatFormat(found.tokenizer)
        return Loaded(found.target, found.tokenizer, chat, None, ())
    same_tokenizer = check_stored_tokenizer(options.draft, found.tokenizer)
    drafter = load_drafter(options.draft, found.target, dtype=dtype, device=device)
    warnings = golden_warnings(options.draft, drafter.eval())
    if options.raw:
        return Loaded(found.target, found.tokenizer, None, drafter, tuple(warnings))
    chat = trained_format(options.draft, config.target, found.tokenizer)
    identity = identity_warnings(config.target, chat, same_tokenizer=same_tokenizer)
    return Loaded(found.target, found.tokenizer, chat, drafter, (*identity, *warnings))


def _policy(options: GenerateOptions, drafter: DSparkDrafter) -> Policy:
    return make_policy(
        options.choice(),
        options.sampling(),
        calibration=drafter.calibration,
        has_confidence=drafter.confidence_head is not None,
        cost=_costs(options),
    )


def _costs(options: GenerateOptions) -> CostModel | None:
    """Step times for the policies that read them: the file named, else the drafter's own."""
    if options.cost_model is not None:
        return load_cost_model(options.cost_model)
    if not options.reads_costs or options.draft is None:
        return None
    own = options.draft / (FRAME_COSTS_FILE if options.graphs else COST_MODEL_FILE)
    return load_cost_model(own) if own.is_file() else None


def _screen(options: GenerateOptions) -> Plain | Marked | Silent:
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that lacks a character still gets text
        sys.stdout.reconfigure(errors="replace")
    if options.json:
        return Silent()
    return Marked(sys.stdout) if options.show_draft else Plain(sys.stdout)


def _frames(options: GenerateOptions, loaded: Loaded, prompt_tokens: int) -> GraphDecoder | None:
    """What --graphs decodes with; raises UserError for what a frame cannot hold."""
    if not options.graphs:
        return None
    check_max_new_tokens(options.max_new_tokens, loaded.target)  # seats are as long from the start
    advice = "frames keep it from the start: ask for fewer tokens, or leave --graphs out"
    with room_for(options.max_new_tokens, advice):
        return GraphDecoder(
            loaded.target,
            loaded.drafter,
            max_length=prompt_tokens + options.max_new_tokens,
            policy=None if loaded.drafter is None else _policy(options, loaded.drafter),
            sampling=options.sampling(),
        )


def _decode(
    options: GenerateOptions,
    loaded: Loaded,
    frames: GraphDecoder | None,
    ids: list[int],
    stop: StopStrings,
    ends: list[int],
    read: RoundCallback,
) -> Account | None:
    """None if Ctrl-C came first."""
    generate: Callable[..., Generation]
    sampling = options.sampling()
    if frames is not None:
        generate = partial(by_frames, frames)
    elif loaded.drafter is None:
        generate = partial(plain_generate, loaded.target, sampling=sampling)
    else:
        generate = partial(
            SpeculativeDecoder(loaded.target, loaded.drafter).generate,
            policy=_policy(options, loaded.drafter),
            method=options.method,
            sampling=sampling,
        )
    try:
        room = room_for(options.max_new_tokens, "ask for fewer tokens")
        with reading_bar(quiet=options.json), room:
            generation = generate(
                ids,
                max_new_tokens=options.max_new_tokens,
                rules=rules_of(options, loaded.tokenizer),
                stop=stop if stop.strings else None,
                end_token_ids=ends,
                seed=options.seed,
                on_round=read,
            )
    except KeyboardInterrupt:
        return None
    return Account.of(generation, frames=frames is not None)


def _document(
    options: GenerateOptions,
    loaded: Loaded,
    frames: GraphDecoder | None,
    prompt: str,
    ids: list[int],
    reader: Reader,
    account: Account,
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "target": loaded.target.name,
        "drafter": None if options.draft is None else str(options.draft),
        "policy": None if loaded.drafter is None else options.choice().name,
        "siblings": options.choice().siblings if options.choice().bands else 0,
        "verification": None if loaded.drafter is None else options.method,
        "graphs": None if frames is None else told(frames),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "text": reader.text,
        "stop": reader.found,
        **account.document(),
        "emitted": [_emitted(piece) for piece in reader.pieces],
    }


def _emitted(piece: Piece) -> dict[str, Any]:
    token = piece.token
    return {
        "token": token.token,
        "text": piece.text,
        "kind": token.kind,
        "confidence": token.confidence,
    }
