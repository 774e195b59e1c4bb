"""Folders whose tokenizer is a `tiktoken.model`: the ids are those of tiktoken's own rule.

The oracle splits the text by the pattern (the regex module knows its sets) and merges the bytes of
each piece two by two, the union of lowest rank first, as tiktoken does.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from dspark.errors import UserError
from dspark.runtime.loading import load_target, load_tokenizer
from tests.tiny_pair import write_pair

PARTS = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
CODE = f"""
import nothing_that_exists

raise RuntimeError("this file is not to be run")


class TikTokenTokenizer:
    pat_str = "|".join({PARTS!r})
"""
WORDS = ["the", " the", " answer", "is", " is", "12", "123", "你好", "世界", " You", "'s", "\n\n"]
TEXTS = [
    "The answer is 12345, isn't it?\n\n  What's the answer?",
    "你好世界 hello你好 123你 e\u0301te\u0301",
    "  spaces   and\ttabs \r\n end  ",
    "🙂🙃 emoji the🙂",
    "",
]


def _ranks() -> dict[bytes, int]:
    """All bytes in a mixed order, then what it takes to reach a few words two by two."""
    ranks = {bytes([(byte * 97) % 256]): byte for byte in range(256)}
    for word in WORDS:
        raw = word.encode()
        for end in range(2, len(raw) + 1):
            ranks.setdefault(raw[:end], len(ranks))
    return ranks


def _write(folder: Path, code: str | None = CODE) -> dict[bytes, int]:
    ranks = _ranks()
    (folder / "tokenizer.json").unlink(missing_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    base = len(ranks)
    special = {base: "[BOS]", base + 1: "[EOS]", base + 4: "<|im_end|>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(id_): {"content": text, "special": True} for id_, text in special.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    if code is not None:
        (folder / "tokenization_kimi.py").write_text(code)
    return ranks


def _encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids = []
    for piece in regex.findall("|".join(PARTS), text, regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            joined = [
                (ranks.get(a + b, len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts))
            ]
            best, at = min(joined, default=(len(ranks), 0))
            if best == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_ids_are_those_of_tiktokens_rule(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ranks = _write(tmp_path)
    tokenizer, _ = load_tokenizer(tmp_path)
    rng = random.Random(0)
    odd = "theansweris 123'sYou你好世界\n\r\t🙂é\u0301!?.,-_ÀÉ"
    mixed = ["".join(rng.choice(odd) for _ in range(rng.randint(1, 40))) for _ in range(300)]
    for text in TEXTS + mixed:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == _encoded(text, ranks)
        assert tokenizer.decode(ids) == text
    assert any(max(_encoded(text, ranks), default=0) > 255 for text in TEXTS)
    base = len(ranks)
    names = ["[BOS]", "[EOS]", f"<|reserved_token_{base + 2}|>", f"<|reserved_token_{base + 3}|>"]
    assert tokenizer.convert_tokens_to_ids([*names, "<|im_end|>"]) == list(range(base, base + 5))
    assert tokenizer("the<|im_end|>the").input_ids[1] == base + 4
    assert (tokenizer.eos_token, len(tokenizer)) == ("[EOS]", base + 5)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_such_a_folder_opens_as_a_target(tmp_path: Path) -> None:
    folder = write_pair(tmp_path).target
    ranks = _write(folder)
    loaded = load_target(folder)
    assert loaded.target.vocab_size <= len(ranks) + 5
    assert len(ranks) + 1 in loaded.target.end_token_ids


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "tokenization_kimi.py").unlink(), "does not say how text is split"),
        (
            lambda f: (f / "tokenization_kimi.py").write_text("pat_str = make()"),
            "no literal pat_str.*tokenizer.json and put that there",
        ),
        (lambda f: (f / "tokenization_kimi.py").write_text("pat_str = ("), "cannot be read as Py"),
        (
            lambda f: (f / "tiktoken.model").write_text("AA== 0\nhello\n"),
            "model:2: expected base64",
        ),
        (lambda f: (f / "tiktoken.model").write_text("AA== 0\nAQ== 2\n"), "the ids 0, 1, 2"),
        (lambda f: (f / "tiktoken.model").unlink(), "tokenizer.json is missing"),
        (
            lambda f: (f / "tokenizer_config.json").write_text(
                '{"added_tokens_decoder": {"x": 1}}'
            ),
            "added_tokens_decoder: x: expected a token",
        ),
    ],
)
def test_what_the_folder_does_not_say_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    _write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=said):
        load_tokenizer(tmp_path)
