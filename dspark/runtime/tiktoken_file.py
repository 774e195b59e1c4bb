"""A tokenizer that came as `tiktoken.model` and a class of Python: read, and never run.

The published K3 and Kimi-Linear folders have no tokenizer.json. What it would say stands in

    tiktoken.model          a line for each token: base64 of its bytes, and its id, its rank too
    tokenizer_config.json   added_tokens_decoder: id -> special token, behind the others
    tokenization_NAME.py    pat_str = "|".join([...]): how text is split before bytes are merged

The pattern is taken from the folder's own code as the literal that it is. Bytes merge by rank: the
neighbours whose union has the lowest first. Ids that nobody names are `<|reserved_token_ID|>`.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import UserError
from dspark.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RANKS_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"
_OTHERS = ("chat_template.jinja", "special_tokens_map.json")
_NOT_OURS = ("auto_map", "tokenizer_class")  # name the code that is not run
WAY_OUT = "save the tokenizer with transformers as a tokenizer.json and put that there"


def tiktoken_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder with a `tiktoken.model` and no tokenizer.json.

    Raises UserError where the folder does not say all of it.
    """
    from transformers import PreTrainedTokenizerFast

    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG_FILE}: expected an object")
    ranks = read_ranks(folder / RANKS_FILE)
    backend = _backend(ranks, split_pattern(folder, config), _special(folder, config, len(ranks)))
    kept = {key: value for key, value in config.items() if key not in _NOT_OURS}
    with tempfile.TemporaryDirectory() as scratch:
        backend.save(str(Path(scratch) / "tokenizer.json"))
        (Path(scratch) / CONFIG_FILE).write_text(json.dumps(kept), encoding="utf-8")
        for name in _OTHERS:
            if (folder / name).is_file():
                shutil.copy(folder / name, scratch)
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(scratch)
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of each token -> its id. Raises UserError naming the line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}:{number}: expected base64 and a number") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise UserError(
            f"{path}: expected the ids 0, 1, 2, ... once each, all 256 bytes among them"
        )
    return ranks


def split_pattern(folder: Path, config: dict[str, Any]) -> str:
    """`pat_str` of the class that tokenizer_config.json names, or of the folder's only one.

    Raises UserError where there is none, or where it is more than literals.
    """
    named = (config.get("auto_map") or {}).get("AutoTokenizer") or [None]
    first = named[0] if isinstance(named, list) else named
    name = f"{first.split('.')[0]}.py" if isinstance(first, str) else "tokenization_*.py"
    files = sorted(path for path in folder.glob(name) if path.parent == folder)
    if len(files) != 1:
        raise UserError(
            f"{folder}: {RANKS_FILE} does not say how text is split, and there is no {name} that "
            f"does; {WAY_OUT}"
        )
    try:
        tree = ast.parse(files[0].read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{files[0]}: cannot be read as Python ({error}); {WAY_OUT}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pat_str" for target in node.targets
        ):
            pattern = _literal(node.value)
            if pattern is not None:
                return pattern
    raise UserError(f"{files[0]}: no literal pat_str, so how text is split is not known; {WAY_OUT}")


def _literal(node: ast.expr) -> str | None:
    """A string, or "SEPARATOR".join([STRINGS]); None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return None
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "join":
        return None
    try:
        separator, parts = ast.literal_eval(node.func.value), ast.literal_eval(node.args[0])
        return str(separator.join(parts))
    except (ValueError, TypeError, AttributeError):
        return None


def _special(folder: Path, config: dict[str, Any], base: int) -> list[str]:
    """Special tokens in the order of their ids, from `base` on."""
    named: dict[int, str] = {}
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        content = token.get("content") if isinstance(token, dict) else token
        if not str(key).isdecimal() or not isinstance(content, str):
            raise UserError(
                f"{folder / CONFIG_FILE}: added_tokens_decoder: {key}: expected a token"
            )
        named[int(key)] = content
    last = max(named, default=base - 1)
    return [named.get(n, f"<|reserved_token_{n}|>") for n in range(base, last + 1)]


def _backend(ranks: dict[bytes, int], pattern: str, special: list[str]) -> Any:
    """The same rules for the tokenizers library."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in merge_pairs(ranks)]
    model = models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return backend


def merge_pairs(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens whose union is a token, by the rank of that, then by their own."""
    pairs = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((rank, left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(pairs)]


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
