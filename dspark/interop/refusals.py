"""Why a layout cannot hold a drafter: what its engines would run is another one.

Every function raises ValueError with the reason, which `dspark export` puts behind the format.
"""

from __future__ import annotations

from dspark.draft.config import DraftConfig


def require_attention(config: DraftConfig, reader: str) -> None:
    """For layouts with a Qwen3-style backbone."""
    if config.backbone == "kda":
        raise ValueError("backbone 'kda' is served by no engine; run it with dspark")
    if config.backbone == "mla":
        raise ValueError(
            f"backbone 'mla' is not what {reader} loads; vLLM and TokenSpeed serve it as k3-mla"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r}: {reader} runs these layers with silu")


def require_full_vocabulary(config: DraftConfig, reader: str) -> None:
    """For engines that take the drafter's distribution to be over the target's ids."""
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size}: {reader} has no "
            "map from draft ids to the target's; vllm and speculators have one"
        )


def require_vanilla(config: DraftConfig, reader: str) -> None:
    """For engines that know one sequential head."""
    if config.markov_head_type != "vanilla":
        raise ValueError(
            f"markov_head_type {config.markov_head_type!r}: {reader} only runs vanilla; sglang "
            "loads gated and rnn"
        )


def require_no_window(config: DraftConfig, reader: str) -> None:
    """For readers that attend fully."""
    if config.sliding_window is not None:
        raise ValueError(f"sliding_window {config.sliding_window}: {reader} attends fully")
    require_free_blocks(config, reader)


def require_free_blocks(config: DraftConfig, reader: str) -> None:
    """For readers that let every slot of a block see all of it."""
    if config.block_causal != "none":
        raise ValueError(
            f"block_causal {config.block_causal!r}: {reader} lets every slot see its whole block"
        )
