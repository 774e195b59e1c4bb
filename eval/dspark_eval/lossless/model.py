"""The joint law of three tokens of a real, tiny model, decoded by a real drafter through its cache.

Target and drafter are random: a K3 with KDA, MLA, experts and Attention Residuals over four tokens,
and a one-layer drafter that reads its taps. Everything between them is what decodes for a user:
draft context, trees of rows, commits along accepted paths, rounds until all texts are long enough.
The law of the 64 texts comes from plain passes over every prefix.

An order more draws would change nothing here: an error of the state shows in whole tokens, and that
kind is held to equality elsewhere. This is the proof that the pieces make one law together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.judge import Method
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import Policy, plan_block
from dspark.runtime.proposal import propose
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.tree import build_rows
from dspark.runtime.verify import verify
from dspark_eval.lossless.planners import SIBLINGS
from dspark_eval.lossless.play import TEXT, row_text
from dspark_eval.lossless.world import reference

TOKENS = 4
SLOTS = 3
CHUNK = 4_000
PROMPT = (2, 0, 3, 1, 1)
"""Its last token is the anchor."""
_MOST_ROWS = 1 + SLOTS * (1 + SIBLINGS)

_K3 = K3Config(
    vocab_size=TOKENS + 1,  # the last row pads the table: the drafter's mask token
    hidden_size=16,
    num_hidden_layers=4,
    full_attention_layers=(2, 3),
    kda_num_heads=2,
    kda_head_dim=4,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=6,
    intermediate_size=32,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=12,
    routed_expert_hidden_size=16,
    attn_res_block_size=2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
_DRAFT = DraftConfig(
    hidden_size=16,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=TOKENS + 1,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    target_tap_kind="attn_res_mixture",
    mask_token_id=TOKENS,
    block_size=SLOTS,
    markov_rank=8,
)


class RealPair:
    """The two models, and the target's law of every text of TEXT tokens after the prompt."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        model, drafter = K3ForCausalLM(_K3), DSparkDrafter(_DRAFT)
        for module in (model, drafter):
            _randomise(module, generator)
        self.target = K3Target(model, "tiny", (1,), vocab_size=TOKENS)
        self.drafter = drafter.eval().requires_grad_(False)
        self.head = DraftHead(self.target, None)

    @torch.inference_mode()
    def law(self, params: SamplingParams) -> Tensor:
        """[TOKENS] * TEXT float64 from one plain pass per prefix."""
        joint = torch.ones([TOKENS] * TEXT, dtype=torch.float64)
        for k in range(TEXT):
            for prefix in itertools.product(range(TOKENS), repeat=k):
                ids = torch.tensor([[*PROMPT, *prefix]])
                cache = self.target.new_cache(1, ids.shape[1])
                out = self.target.forward(ids, cache, commit=True)
                p = reference(self.target.logits(out.hidden[0, -1]), params)
                joint[prefix] *= p.view([TOKENS] + [1] * (TEXT - k - 1))
        return joint

    @torch.inference_mode()
    def texts(
        self,
        draws: int,
        params: SamplingParams,
        policy: Policy,
        siblings: int,
        method: Method,
        generator: torch.Generator,
    ) -> Iterator[Tensor]:
        """Chunks [b, TEXT] of what decoding says after the prompt."""

        for start in range(0, draws, CHUNK):
            batch = _Batch(self, min(CHUNK, draws - start), params, generator)
            yield batch.run(policy, siblings, method)


class _Batch:
    """Some texts on their way; those that are long enough leave it."""

    def __init__(
        self, pair: RealPair, count: int, params: SamplingParams, generator: torch.Generator
    ) -> None:
        self.pair, self.params, self.generator = pair, params, generator
        length = len(PROMPT) + TEXT * (SLOTS + 2) + _MOST_ROWS
        self.cache = pair.target.new_cache(count, length)
        self.context = pair.drafter.new_context(count, length)
        prompt = torch.tensor(PROMPT).expand(count, -1)
        out = pair.target.forward(prompt[:, :-1], self.cache, taps=pair.drafter.taps, commit=True)
        assert out.taps is not None
        pair.drafter.extend(self.context, out.taps)
        self.anchor = prompt[:, -1]

    def run(self, policy: Policy, siblings: int, method: Method) -> Tensor:
        """Rounds until every text has TEXT tokens: [b, TEXT]."""
        text = torch.full((len(self.anchor), TEXT), -1)
        going = torch.arange(len(text))
        while len(going):
            said = self._round(policy, siblings, method)
            text[going] = _joined(text[going], said)
            self.anchor = said.gather(1, (said >= 0).sum(dim=1, keepdim=True) - 1).squeeze(1)
            left = (text[going, -1] < 0).nonzero().squeeze(1)
            if len(left):
                self.cache.select(left)
                self.context.select(left)
            self.anchor, going = self.anchor[left], going[left]
        return text

    def _round(self, policy: Policy, siblings: int, method: Method) -> Tensor:
        """Draft, plan, verify and commit: what every row says [b, n], -1 behind it."""
        pair, taps = self.pair, self.pair.drafter.taps
        ask = (pair.drafter, pair.head, self.context, self.anchor, SLOTS)
        made = propose(*ask, self.params, self.generator, siblings=siblings)
        plan = plan_block(policy, made)
        rows = build_rows(self.anchor, made, plan)
        out = pair.target.forward(
            rows.tokens,
            self.cache,
            valid=rows.valid,
            parents=rows.forward_parents,
            taps=taps,
            commit=False,
        )
        logits = pair.target.logits(out.hidden)
        verdict = verify(made, logits, self.params, self.generator, plan, rows, method=method)
        path = rows.path(verdict)
        self.cache.commit_path(path)
        assert out.taps is not None
        kept = path.clamp(min=0).unsqueeze(-1).expand(-1, -1, out.taps.shape[-1])
        pair.drafter.extend(self.context, out.taps.gather(1, kept), (path >= 0).sum(dim=1))
        return row_text(made, verdict)


def _joined(text: Tensor, said: Tensor) -> Tensor:
    """Texts [b, TEXT] with what a round said [b, n] at their open ends; -1 is nothing."""
    both = torch.cat((text, said), dim=1)
    order = (both < 0).long().argsort(dim=1, stable=True)
    return both.gather(1, order)[:, : text.shape[1]]


@torch.no_grad()
def _randomise(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of order one over the root of their width, vectors away from zero and one."""
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            scale = 0.5 if "conv" in name else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(scale * noise)
        else:
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.3 * noise)
