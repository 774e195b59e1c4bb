"""The nano tokenizer: byte-level BPE of 2,048 entries, trained on generated text.

Digits are split one by one before anything else, so a number is always the sequence of its digits
and arithmetic looks the same at every length. Special tokens end the vocabulary, as K3's do.
Training is a function of the generator alone: the same code writes the same bytes.

    python -m dspark.nano.tokenizer --out data/k3-nano
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dspark.console import Parser, module_command
from dspark.nano import chat
from dspark.nano.generate import row

VOCAB_SIZE = 2048
CORPUS_SEED = 0
CORPUS_ROWS = 20_000
MAX_LENGTH = 2048


def corpus(rows: int = CORPUS_ROWS) -> Iterator[str]:
    """The ordinary text of `rows` training chats: headers without their marks, and contents."""
    for index in range(rows):
        for message in row(CORPUS_SEED, index, "train").messages:
            yield f'message role="{message["role"]}"'
            yield message["content"]
        if index % 10 == 0:
            yield 'message role="system"'
            yield "think"


def train_tokenizer(rows: int = CORPUS_ROWS) -> Tokenizer:
    """Train on `rows` chats; ordinary tokens first, then `chat.SPECIAL_TOKENS`, 2,048 in all.

    Raises ValueError if the text is too small to fill the vocabulary.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(chat.SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(rows), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in chat.SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"{rows} rows gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}; use more rows"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `transformers.AutoTokenizer` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BOS,
        "eos_token": chat.END_OF_MESSAGE,
        "pad_token": chat.PAD,
        "unk_token": chat.UNK,
        "mask_token": chat.MASK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
    }
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(chat.CHAT_TEMPLATE, "utf-8")


@module_command
def main(arguments: Sequence[str]) -> None:
    """Train and save."""
    parser = Parser(
        prog="python -m dspark.nano.tokenizer", description="Train and save the nano tokenizer."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder, for example data/k3-nano")
    given = parser.parse_args(arguments)
    save_tokenizer(train_tokenizer(), given.out)
    print(f"{VOCAB_SIZE} tokens in {given.out}")


if __name__ == "__main__":
    sys.exit(main())
