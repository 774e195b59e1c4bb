"""Rules of sampling: what may be said next, given everything said so far.

    p_k = to_probs(rules(target logits of row k, prefix of row k))

A rule changes a row of logits and sees nothing but that row and its *prefix*: the prompt, all
committed tokens, and the tokens of the block on the row's own path up to and including the row.
Because it is a function of these alone, it makes no difference whether the row was computed in a
step of its own or in the middle of a block, so that speculative decoding follows the same law as
plain decoding. The draft's q gets the same rules, slot by slot, only so that it stays close to p:
q may be anything, and losslessness never rests on it.

Order: logit bias, the processors in their order, then `min_new_tokens`, so that nothing brings an
end token back. Temperature and filters come after all of them, as in transformers.

`Rules` is what a user asks for; `Rules.bind` makes the `RequestRules` of one request, which know
its prompt and end tokens and carry its history.

Letters: R rows, V vocabulary of the target, V' of the drafter, N tokens of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.sampling import check_logits

Processor = Callable[[Tensor, Tensor], Tensor]
"""A transformers `LogitsProcessor`: ids [n, N] int64, scores [n, V] float32 -> scores [n, V]."""

_NOT_OF_THE_PREFIX = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}
"""Those of transformers that count calls, keep a cache or read a second batch row."""


@dataclass(frozen=True)
class Rules:
    """What a request asks for beyond `SamplingParams`. Invalid values raise UserError.

    logit_bias      token id -> number added to its logit; -inf forbids the token
    min_new_tokens  end tokens are forbidden until this many new tokens are there
    processors      transformers logits processors (a `LogitsProcessorList` will do), each of them
                    a function of prefix and scores; their results must not depend on earlier calls
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(f"logit_bias: expected token ids >= 0, got {token!r}")
            if math.isnan(bias) or bias == math.inf:
                raise UserError(
                    f"logit_bias: expected a finite number or -inf for token {token}, got {bias}"
                )
        if self.min_new_tokens < 0:
            raise UserError(f"min_new_tokens: expected at least 0, got {self.min_new_tokens}")
        for processor in self.processors:
            if type(processor).__name__ in _NOT_OF_THE_PREFIX:
                raise UserError(
                    f"{type(processor).__name__}: its scores depend on more than the tokens before "
                    "them, which speculative decoding cannot keep; decode with transformers"
                )

    def bind(
        self,
        prompt_ids: Sequence[int],
        end_token_ids: Collection[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> RequestRules:
        """These rules for one request. Raises UserError for a bias outside the vocabulary."""
        beyond = [token for token in self.logit_bias if token >= vocab_size]
        if beyond:
            raise UserError(
                f"logit_bias: expected token ids 0..{vocab_size - 1} of the target, got {beyond[0]}"
            )
        return RequestRules(self, prompt_ids, end_token_ids, vocab_size, torch.device(device))


class RequestRules:
    """The rules of one running request, and the tokens they have to look at.

    `history` [N] int64 is the prompt and everything emitted; its last token is the anchor. Whoever
    runs the request calls `extend` with the emitted tokens of each round (the first anchor too).
    """

    def __init__(
        self,
        rules: Rules,
        prompt_ids: Sequence[int],
        end_token_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.history = torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)
        self._width = vocab_size
        self._processors = tuple(rules.processors)
        self._ends_allowed_from = len(prompt_ids) + rules.min_new_tokens
        ends = [token for token in end_token_ids if 0 <= token < vocab_size]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._dead_ends: list[Tensor] = []  # prefixes of the last block that nothing may follow
        self._bias: Tensor | None = None
        if rules.logit_bias:
            self._bias = torch.zeros(vocab_size, device=device)
            for token, bias in rules.logit_bias.items():
                self._bias[token] = bias

    def extend(self, tokens: Sequence[int] | Tensor) -> None:
        """Append emitted tokens [n]. Raises UserError if one of them stands where none may."""
        new = torch.as_tensor(tokens, dtype=torch.int64, device=self.history.device)
        self.history = torch.cat((self.history, new))
        for prefix in self._dead_ends:
            size = len(prefix)
            if size < len(self.history) and torch.equal(self.history[:size], prefix):
                raise _no_token(size)
        self._dead_ends = []

    def after(self, logits: Tensor) -> Tensor:
        """[1, V] target logits of the history's last token -> [1, V].

        Raises BadLogits for logits that were bad before any rule, UserError if the rules leave no
        token.
        """
        ruled, empty = self._of_target(logits, [self.history])
        if empty:
            raise _no_token(len(self.history))
        return ruled

    def block(self, logits: Tensor, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """[R, V] target logits of a verify pass -> [R, V], every row by its own path.

        Args:
            tokens: The rows' tokens [R] int64; row 0 is the anchor, the history's last token.
            parents: Row above each row [R] int64, -1 for row 0 (and for rows that pad a tree,
                which are treated as row 0); None: a chain, each row follows the one before.

        A row whose tokens are all forbidden keeps its logits: it may follow a draft that no text
        follows. Should the text get past it, `extend` raises.
        Raises BadLogits for logits that were bad before any rule.
        """
        if parents is None:
            paths = [tokens[1 : row + 1] for row in range(tokens.shape[0])]
        else:
            paths = [tokens[path] for path in _paths(parents.tolist())]
        prefixes = [torch.cat((self.history, path)) for path in paths]
        ruled, empty = self._of_target(logits, prefixes)
        self._dead_ends = [prefixes[row] for row in empty]
        ruled[empty] = logits[empty]
        return ruled

    def slot(self, logits: Tensor, drafted: Tensor, ids: Tensor | None = None) -> Tensor:
        """Drafter logits [V'] after the history and `drafted` [k] int64 target ids -> [V'].

        `ids` [V'] int64 are the target ids of a reduced vocabulary. Where the rules leave the
        drafter no token at all its logits stay as they are: a draft need not obey.
        """
        wide = logits
        if ids is not None:
            wide = logits.new_full((self._width,), -torch.inf).index_copy_(0, ids, logits)
        ruled = self.apply(wide.unsqueeze(0), [torch.cat((self.history, drafted))]).squeeze(0)
        if ids is not None:
            ruled = ruled[ids]
        return torch.where(ruled.amax() > -torch.inf, ruled, logits)

    def apply(self, logits: Tensor, prefixes: Sequence[Tensor | Sequence[int]]) -> Tensor:
        """[R, V] logits -> [R, V], a new tensor; row r follows exactly the ids `prefixes[r]`."""
        ruled = logits.clone() if self._bias is None else logits + self._bias
        if self._processors:
            for rows, ids in _by_length(prefixes, logits.device):
                ruled[rows] = self._process(ids, ruled[rows])
        early = [r for r, ids in enumerate(prefixes) if len(ids) < self._ends_allowed_from]
        if early and self._ends.numel():
            rows = torch.tensor(early, device=logits.device)
            ruled[rows.unsqueeze(1), self._ends] = -torch.inf
        return ruled

    def _process(self, ids: Tensor, scores: Tensor) -> Tensor:
        for processor in self._processors:
            shape = scores.shape
            scores = processor(ids, scores)
            if scores.shape != shape:
                raise UserError(
                    f"{type(processor).__name__}: expected scores {list(shape)} for scores "
                    f"{list(shape)}, got {list(scores.shape)}"
                )
        return scores

    def _of_target(self, logits: Tensor, prefixes: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Ruled logits, and the rows that have no token left."""
        check_logits(logits.unsqueeze(0))  # a rule may hide what is wrong: before any of them
        ruled = self.apply(logits, prefixes)
        return ruled, (ruled.amax(dim=-1) == -torch.inf).nonzero().flatten().tolist()


def _no_token(position: int) -> UserError:
    return UserError(
        f"sampling rules: no token is left for position {position} of the text; loosen them"
    )


def _paths(parents: list[int]) -> list[list[int]]:
    """For each row the rows below the root that lead to it, itself last; nothing for the root."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*paths[parent], row] if parent >= 0 else [])
    return paths


def _by_length(
    prefixes: Sequence[Tensor | Sequence[int]], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Row numbers [n] and ids [n, N] of the rows whose prefixes are equally long."""
    groups: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        groups.setdefault(len(prefix), []).append(row)
    return [
        (
            torch.tensor(rows, device=device),
            torch.stack(
                [torch.as_tensor(prefixes[row], dtype=torch.int64, device=device) for row in rows]
            ),
        )
        for rows in groups.values()
    ]
