"""A target and a drafter loaded side by side, with every check that comes before measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dspark.devices import find_device
from dspark.distill.chat import ChatFormat, RowError
from dspark.distill.fingerprint import check_stored_tokenizer
from dspark.distill.identity import identity_warnings, trained_format
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.golden_check import golden_warnings
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.asked import check_draft_length, check_max_new_tokens
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Fixed
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.drafting import Drafted
from dspark_eval.long_context import prompts_in_context, speculative_after
from dspark_eval.settings import BenchOptions, CalibrateOptions, EvalOptions
from dspark_eval.speed import Decode
from dspark_eval.suites import Suite


@dataclass(frozen=True)
class Pair:
    """What is measured. `warnings` holds what the checks found but did not refuse."""

    target: Target
    drafter: DSparkDrafter
    chat: ChatFormat
    drafter_name: str
    draft_length: int
    warnings: tuple[str, ...] = ()

    def prompt_ids(self, suite: Suite) -> list[list[int]]:
        """Token ids of each prompt, the opening of the answer's turn included.

        Raises `UserError` with file and line where the chat template refuses a conversation.
        """
        ids, place = [], prompts_in_context(self.chat, suite.context)
        for row in suite.rows:
            try:
                ids.append(place(row.prompt))
            except RowError as problem:
                raise UserError(f"{row.file}:{row.line}: {problem}; fix or drop the line") from None
        return ids

    def plain(self, sampling: SamplingParams, max_new_tokens: int) -> Decode:
        """Plain decoding: one token per target pass."""
        generate = partial(
            plain_generate, self.target, max_new_tokens=max_new_tokens, sampling=sampling
        )
        return lambda prompt, seed: generate(prompt, seed=seed)

    def speculative_after(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        max_new_tokens: int,
        drafted: Drafted | None = None,
    ) -> Decode:
        """`speculative` for these prompts alone: a long beginning that all share is read once."""
        return speculative_after(
            self.target,
            self.drafter,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            drafted=drafted or self.constant,
        )

    def speculative(
        self, sampling: SamplingParams, max_new_tokens: int, drafted: Drafted | None = None
    ) -> Decode:
        """Draft and verify as `drafted` says; None: with the draft length of this pair."""
        drafted = drafted or self.constant
        return drafted.decode(self.target, self.drafter, sampling, max_new_tokens)

    @property
    def constant(self) -> Drafted:
        """The draft length of this pair in every round, token by token."""
        return Drafted(Fixed(self.draft_length))


def load_pair(options: BenchOptions | EvalOptions | CalibrateOptions) -> Pair:
    """Load target and drafter and check that they belong together.

    Raises `UserError`: a missing folder, a drafter of another target's shape or tokenizer, a draft
    length that the drafter was not trained for, a device that is not there.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = find_device(options.device, "--device")
    # the drafter's config first: it costs nothing, a large target takes a minute
    config = read_config(options.draft)
    draft_length = check_draft_length(options.draft_length, config.block_size)
    dtype = getattr(torch, options.dtype)
    loaded = load_target(options.target, dtype=dtype, device=device)
    check_max_new_tokens(options.max_new_tokens, loaded.target)
    same_tokenizer = check_stored_tokenizer(options.draft, loaded.tokenizer)
    drafter = load_drafter(options.draft, loaded.target, dtype=dtype, device=device)
    chat = trained_format(options.draft, config.target, loaded.tokenizer)
    warnings = [
        *(f"target {loaded.target.name}: {note}" for note in loaded.target.notes),
        *identity_warnings(config.target, chat, same_tokenizer=same_tokenizer),
        *golden_warnings(options.draft, drafter.eval()),
    ]
    return Pair(
        target=loaded.target,
        drafter=drafter,
        chat=chat,
        drafter_name=str(options.draft),
        draft_length=draft_length,
        warnings=tuple(warnings),
    )
