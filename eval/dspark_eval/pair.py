"""A target and a drafter loaded side by side, with every check that comes before measuring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark.devices import find_device
from dspark.distill.chat import ChatFormat, RowError
from dspark.distill.fingerprint import check_stored_tokenizer, tokenizer_fingerprint
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.config import TargetRecord
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.settings import BenchOptions, CalibrateOptions, EvalOptions
from dspark_eval.speed import Decode
from dspark_eval.suites import Suite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        ids = []
        for row in suite.rows:
            try:
                ids.append(self.chat.prompt_ids(row.prompt))
            except RowError as problem:
                raise UserError(f"{row.file}:{row.line}: {problem}; fix or drop the line") from None
        return ids

    def plain(self, sampling: SamplingParams, max_new_tokens: int) -> Decode:
        """Plain decoding: one token per target pass."""
        generate = partial(
            plain_generate, self.target, max_new_tokens=max_new_tokens, sampling=sampling
        )
        return lambda prompt, seed: generate(prompt, seed=seed)

    def speculative(self, sampling: SamplingParams, max_new_tokens: int) -> Decode:
        """Draft and verify, with the draft length of this pair."""
        generate = partial(
            SpeculativeDecoder(self.target, self.drafter).generate,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            draft_length=self.draft_length,
        )
        return lambda prompt, seed: generate(prompt, seed=seed)


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
    same_tokenizer = check_stored_tokenizer(options.draft, loaded.tokenizer)
    drafter = load_drafter(options.draft, loaded.target, dtype=dtype, device=device)
    chat = trained_format(options.draft, config.target, loaded.tokenizer)
    return Pair(
        target=loaded.target,
        drafter=drafter.eval(),
        chat=chat,
        drafter_name=str(options.draft),
        draft_length=draft_length,
        warnings=tuple(identity_warnings(config.target, chat, same_tokenizer=same_tokenizer)),
    )


def trained_format(
    draft: Path | str, trained_on: TargetRecord | None, tokenizer: PreTrainedTokenizerBase
) -> ChatFormat:
    """How prompts were written for the drafter: with its template and its thinking switch.

    The template is the target's own, or the one kept beside the drafter; the hash that the drafter
    recorded says which, and whether thinking was on. Where none fits, prompts are written as the
    target's template does without thinking (`identity_warnings` then says so).
    """
    kept = Path(draft) / "chat_template.jinja"
    templates: list[str | None] = [str(kept)] if kept.is_file() else []
    if tokenizer.chat_template or not templates:
        templates.insert(0, None)
    wanted = trained_on.template_hash if trained_on else None
    first = ChatFormat(tokenizer, template=templates[0])
    if wanted in (None, first.fingerprint):
        return first
    for template in templates:
        for thinking in (False, True):
            chat = ChatFormat(tokenizer, thinking=thinking, template=template)
            if chat.fingerprint == wanted:
                return chat
    return first


def check_draft_length(asked: int | None, block_size: int) -> int:
    """The draft length to run: the block size unless asked for; a longer one is refused.

    Beyond the trained block acceptance collapses at every position, the early ones too.
    """
    length = block_size if asked is None else asked
    if not 1 <= length <= block_size:
        raise UserError(
            f"--draft-length {length}: this drafter was trained with block size {block_size}; "
            f"expected 1..{block_size}"
        )
    return length


def identity_warnings(
    trained_on: TargetRecord | None, chat: ChatFormat, *, same_tokenizer: bool = False
) -> list[str]:
    """What the drafter says of the tokenizer and chat template it was trained with, if not these.

    Shapes alone do not tell: with another tokenizer of the same size, or with other turn tags, a
    drafter loads and runs, and its proposals are rejected. Where the drafter's own tokenizer has
    been compared (`same_tokenizer`), padding rows may differ and no hash is asked.
    """
    if trained_on is None:
        return []
    found = []
    here = tokenizer_fingerprint(chat.tokenizer)
    if not same_tokenizer and trained_on.tokenizer_hash not in (None, here):
        found.append(
            f"the drafter was trained with the tokenizer of {trained_on.name}, which is not the "
            "target's: expect few accepted tokens"
        )
    if trained_on.template_hash not in (None, chat.fingerprint):
        found.append(
            f"the drafter was trained with the chat template of {trained_on.name}, which is not "
            "the target's: accepted length is understated"
        )
    return found
