"""What `--compare` takes: drafters and baselines by folder or by word, each ready to decode.

plain           one token a step
lookup          prompt lookup
model:NAME      a causal LM of the target's vocabulary, as `load_target` opens it
FOLDER          a drafter, or a baseline that `python -m dspark_eval.baselines train` wrote
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from dspark.distill.chat import ChatFormat
from dspark.distill.fingerprint import check_stored_tokenizer
from dspark.distill.identity import identity_warnings, trained_format
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.golden_check import golden_warnings
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.judge import Method
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.baselines.autoregressive import Autoregressive
from dspark_eval.baselines.base import Baseline, BaselineDecoder
from dspark_eval.baselines.dflash import DFlash
from dspark_eval.baselines.eagle_drafter import Eagle
from dspark_eval.baselines.folders import kind_of, open_ar, open_baseline
from dspark_eval.baselines.lookup import PromptLookup
from dspark_eval.speed import Decode

PLAIN, LOOKUP, MODEL = "plain", "lookup", "model:"
BLOCK_KINDS = ("dspark", "dflash")
"""Trained for blocks of one size."""
LONGEST = 7
"""Tokens of a proposal for those that were trained for no block, unless a draft length is given."""


@dataclass(frozen=True)
class Contender:
    """One way to decode.

    Attributes:
        name: As it was asked for.
        kind: plain, lookup, ar, dflash, eagle3 or dspark.
        way: What decodes; None: plain decoding.
        block_size: Longest proposal; 0 for plain decoding.
        parameters: Trained for drafting, tables of its own included; None where nothing was.
    """

    name: str
    kind: str
    way: SpeculativeDecoder | BaselineDecoder | None
    block_size: int
    parameters: int | None

    def decode(
        self,
        target: Target,
        sampling: SamplingParams,
        *,
        max_new_tokens: int,
        draft_length: int | None,
        method: Method,
    ) -> Decode:
        """Prompt and seed to an answer. Raises UserError for a draft length beyond the block."""
        if draft_length is not None and draft_length > self.block_size > 0:
            raise UserError(
                f"--draft-length {draft_length}: {self.name} drafts at most {self.block_size}"
            )
        if self.way is None:
            alone = partial(
                plain_generate, target, max_new_tokens=max_new_tokens, sampling=sampling
            )
            return lambda prompt, seed: alone(prompt, seed=seed)
        generate = partial(
            self.way.generate,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            draft_length=draft_length,
            method=method,
        )
        return lambda prompt, seed: generate(prompt, seed=seed)

    def facts(self) -> dict[str, Any]:
        """For JSON. `passes` is how many passes of the drafter a proposal of k tokens takes."""
        passes = {"plain": "0", "lookup": "0", "dspark": "1", "dflash": "1"}
        return {
            "name": self.name,
            "kind": self.kind,
            "block_size": self.block_size,
            "parameters": self.parameters,
            "passes": passes.get(self.kind, "k"),
        }


def open_contender(name: str, loaded: LoadedTarget, draft_length: int | None) -> Contender:
    """A contender by what it is called. Raises UserError for a name that is nothing of these."""
    target = loaded.target
    if name == PLAIN:
        return Contender(name, PLAIN, None, 0, None)
    if name == LOOKUP:
        lookup = PromptLookup(draft_length or LONGEST, target.device)
        return _proposing(name, lookup, target)
    if name == MODEL:
        raise UserError(f"--compare {MODEL}: expected a model's name or folder behind the colon")
    if name.startswith(MODEL):
        return _proposing(name, open_ar(name.removeprefix(MODEL), target, draft_length), target)
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(
            f"--compare {name}: expected {PLAIN}, {LOOKUP}, {MODEL}NAME or the folder of a drafter "
            "or a baseline"
        )
    kind = kind_of(folder)
    if kind is not None:
        return _proposing(name, open_baseline(folder, kind, target, draft_length), target)
    drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device).eval()
    way = SpeculativeDecoder(target, drafter)
    return Contender(name, "dspark", way, drafter.config.block_size, _count(drafter))


def own_warnings(contender: Contender) -> list[str]:
    """What a drafter's stored examples say of the one that was loaded."""
    way = contender.way
    if contender.kind != "dspark" or not isinstance(way, SpeculativeDecoder):
        return []
    drafter = way.drafter
    return golden_warnings(contender.name, drafter) if isinstance(drafter, DSparkDrafter) else []


def _proposing(name: str, baseline: Baseline, target: Target) -> Contender:
    way = BaselineDecoder(target, baseline)
    block = baseline.config.block_size
    return Contender(name, baseline.name, way, block, _parameters(baseline))


def _parameters(baseline: Baseline) -> int | None:
    if isinstance(baseline, DFlash):
        drafter = baseline.drafter
        return _count(drafter) - _count(drafter.markov_head)  # which adds zero
    if isinstance(baseline, Eagle):
        return _count(baseline.model)
    if isinstance(baseline, Autoregressive):
        model = baseline.model
        inner = model.parts.model if isinstance(model, HFTarget) else getattr(model, "model", None)
        return _count(inner) if isinstance(inner, nn.Module) else None
    return None


def _count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def chat_of(names: Sequence[str], loaded: LoadedTarget) -> tuple[ChatFormat, list[str]]:
    """How prompts are written, the same for all: as for the first drafter that says how it was
    trained; and what the others say of it. Raises UserError for one of another tokenizer."""
    chat, warnings = None, []
    for name in names:
        folder = Path(name)
        kind = kind_of(folder) if folder.is_dir() else "none"
        if kind not in (None, "dflash"):
            continue
        record = read_config(folder).target
        same = check_stored_tokenizer(folder, loaded.tokenizer)
        chat = chat or trained_format(folder, record, loaded.tokenizer)
        said = identity_warnings(record, chat, same_tokenizer=same)
        warnings += [f"{name}: {text}" for text in said]
    return chat or ChatFormat(loaded.tokenizer), warnings
