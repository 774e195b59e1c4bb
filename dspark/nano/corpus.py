"""The training corpus of k3-nano: chats as token rows in memory, made by all cores."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dspark.assets import asset
from dspark.nano.generate import row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_TASK = 4096


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The shipped tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asset("k3-nano"))


@dataclass(frozen=True)
class Corpus:
    """Rows [n, length + 1] int16, right-padded, and the number of tokens before the answer [n]."""

    tokens: Tensor
    prompt_lengths: Tensor
    mean_length: float

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Corpus:
        return replace(
            self, tokens=self.tokens.to(device), prompt_lengths=self.prompt_lengths.to(device)
        )

    @classmethod
    def build(cls, tokenizer: PreTrainedTokenizerBase, seed: int, rows: int, length: int) -> Corpus:
        """Rows 0.. of the training split; those longer than ``length`` + 1 tokens are left out."""
        tasks = [
            (seed, i, min(i + ROWS_PER_TASK, rows), length) for i in range(0, rows, ROWS_PER_TASK)
        ]
        context = multiprocessing.get_context("fork")
        with context.Pool(os.cpu_count(), initializer=_start, initargs=(tokenizer,)) as pool:
            parts = pool.map(_rows, tasks)
        tokens = np.concatenate([part[0] for part in parts])
        real = sum(part[2] for part in parts)
        return cls(
            torch.from_numpy(tokens),
            torch.from_numpy(np.concatenate([part[1] for part in parts])),
            real / len(tokens),
        )


_tokenizer: PreTrainedTokenizerBase


def _start(tokenizer: PreTrainedTokenizerBase) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizer


def _rows(task: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    seed, first, last, length = task
    chats = [row(seed, i, "train").messages for i in range(first, last)]
    whole = _encode(chats, prompt=False)
    prompts = _encode([chat[:1] for chat in chats], prompt=True)
    kept = [i for i, ids in enumerate(whole) if len(ids) <= length + 1]
    tokens = np.full((len(kept), length + 1), _tokenizer.pad_token_id, dtype=np.int16)
    for at, i in enumerate(kept):
        tokens[at, : len(whole[i])] = whole[i]
    lengths = np.array([len(prompts[i]) for i in kept], dtype=np.int64)
    return tokens, lengths, sum(len(whole[i]) for i in kept)


def _encode(chats: list[list[dict[str, str]]], *, prompt: bool) -> list[list[int]]:
    texts = _tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=prompt)
    return _tokenizer(texts, add_special_tokens=False)["input_ids"]
