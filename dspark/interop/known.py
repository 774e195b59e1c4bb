"""Published K3 drafters, recognised by their exact shape, and what they were trained on.

What a tap holds, and which revision of the rotary positions belongs to the weights, stands in none
of their files, and the wrong choice runs: it only accepts less. For a drafter that is recognised it
is known, and whoever states something else is told so.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.draft.shapes import Yarn
from dspark.interop.spec import Rope


@dataclass(frozen=True)
class Known:
    """One published drafter.

    Attributes:
        name: On the Hugging Face hub.
        shape: Fields of `DraftConfig` that identify it.
        tap_kind: What its taps held in training; None where its makers do not say.
        mask_token_id, block_size, num_target_layers: As trained.
        ropes: Rotary positions by revision.
        tap_hint: What is known of the taps where `tap_kind` is None.
    """

    name: str
    shape: dict[str, object]
    tap_kind: str | None
    mask_token_id: int
    block_size: int
    ropes: dict[str, Rope]
    num_target_layers: int = 93
    tap_hint: str = ""


_K3 = {"hidden_size": 7168, "intermediate_size": 14336, "vocab_size": 163840, "num_layers": 5}

KNOWN = (
    Known(
        name="RadixArk/Kimi-K3-DSpark",
        shape={
            **_K3,
            "num_attention_heads": 64,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "target_layer_ids": (7, 23, 51, 67, 83),
        },
        tap_kind="attn_res_mixture",
        mask_token_id=163824,
        block_size=7,
        ropes={
            "revision eb03982e": Rope(10_000.0),
            "revision 3c5bac30": Rope(10_000.0, Yarn(16.0, 65536)),
            "SpecForge's recipe": Rope(10_000.0, Yarn(16.0, 4096)),
        },
    ),
    Known(
        name="Inferact/Kimi-K3-DSpark",
        shape={
            **_K3,
            "num_attention_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "target_layer_ids": (2, 23, 47, 71, 89),
        },
        tap_kind="raw_prefix",
        mask_token_id=163837,
        block_size=7,
        ropes={
            "revision cf6b8244": Rope(50_000.0, Yarn(32.0, 32768, mscale=1.0, mscale_all_dim=1.0))
        },
    ),
    Known(
        name="RedHatAI/Kimi-K3-speculator.dspark",
        shape={
            **_K3,
            "num_attention_heads": 96,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "target_layer_ids": (23, 47, 71, 87, 91),
        },
        tap_kind=None,
        mask_token_id=163837,
        block_size=8,
        ropes={"revision 38a88101": Rope(10_000.0)},
        tap_hint="trained on states that vLLM captured, whose default is raw_prefix",
    ),
)


def recognise(shape: dict[str, object]) -> Known | None:
    """The published drafter that has these fields, if there is one."""
    for known in KNOWN:
        if all(shape.get(key) == value for key, value in known.shape.items()):
            return known
    return None
