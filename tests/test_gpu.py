"""The same results on a GPU: devices of every index, mask and generator; laws of the samples.

Shapes are tiny: what is tested is where tensors live and what the device rounds, not speed. The
reference is the CPU in float32, by the policy of tolerance.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.distill.apart import ApartGradients
from dspark.distill.chat import TrainingRow
from dspark.distill.objective import to_vector
from dspark.distill.optim import FlatGradients
from dspark.distill.processes import Processes
from dspark.distill.train_settings import TrainSettings
from dspark.distill.trainer import Trainer
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.k3 import layout
from dspark.k3.checkpoint import load_k3, save_k3
from dspark.k3.config import K3Config
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.sampling import SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.laws import proposal, pvalue, reference
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GREEDY = SamplingParams()
CONFIGS = pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])


def target_on(device: torch.device, config: K3Config = TINY) -> K3Target:
    return K3Target(tiny_model(config).to(device), "tiny", ())


def drafter_on(device: torch.device, kind: str = "attn_res_mixture") -> DSparkDrafter:
    torch.manual_seed(1)
    config = DraftConfig(
        hidden_size=TINY.hidden_size,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=TINY.vocab_size,
        num_target_layers=TINY.num_hidden_layers,
        target_layer_ids=(0, 2, 5),
        target_tap_kind=kind,
        mask_token_id=0,
        block_size=5,
        markov_rank=8,
    )
    return DSparkDrafter(config).to(device).eval()


@CONFIGS
def test_padded_prefill_and_ragged_rounds_are_those_of_the_cpu(config: K3Config):
    """Left padding, a ragged verify, a commit for each row, a selection, a plain step."""
    tokens, block, step = (tiny_tokens(3, n, seed=n) for n in (20, 6, 1))
    valid = torch.arange(20) >= torch.tensor([0, 5, 17]).unsqueeze(1)
    accepted, kept = torch.tensor([6, 0, 3]), torch.tensor([2, 0])
    hidden = {}
    for device in (CPU, GPU):
        target = target_on(device, config)
        cache = target.new_cache(3, 40)
        out = target.forward(tokens.to(device), cache, valid=valid.to(device), commit=True).hidden
        rows = target.forward(block.to(device), cache, commit=False).hidden
        cache.commit(accepted.to(device))
        cache.select(kept.to(device))
        last = target.forward(step[:2].to(device), cache, commit=True).hidden
        assert cache.lengths.device.type == device.type
        assert cache.lengths.tolist() == [7, 27]
        hidden[device] = [out.cpu()[valid], rows.cpu(), last.cpu()]
    for ours, expected in zip(hidden[GPU], hidden[CPU], strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, 0.9, 20)])
def test_the_loop_runs_and_greedy_text_is_the_plain_one(sampling: SamplingParams):
    target, drafter = target_on(GPU), drafter_on(GPU)
    options = {"max_new_tokens": 40, "sampling": sampling, "seed": 3}
    fast = SpeculativeDecoder(target, drafter).generate([5, 6, 7], draft_length=4, **options)
    assert len(fast.tokens) == 40
    again = SpeculativeDecoder(target, drafter).generate([5, 6, 7], draft_length=4, **options)
    assert again.tokens == fast.tokens
    if sampling.greedy:
        assert fast.tokens == plain_generate(target, [5, 6, 7], **options).tokens


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8)])
def test_ragged_batches_equal_single_rows(sampling: SamplingParams):
    target = target_on(GPU)
    prompts = [tiny_tokens(1, n, seed=n)[0].tolist() for n in (3, 17, 40)]
    options = {"max_new_tokens": 16, "sampling": sampling, "end_token_ids": range(0, 61, 12)}
    together = generate_batch(target, prompts, **options)
    for i, prompt in enumerate(prompts):
        assert generate_batch(target, [prompt], **options, indices=[i]) == [together[i]]


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, 0.9, 20)])
def test_the_verdict_keeps_the_targets_law(params: SamplingParams):
    """300,000 draws on the device, chi-square of both positions at a false-alarm rate of 1e-4."""
    rows, vocab = 300_000, 24
    generator = torch.Generator(GPU).manual_seed(5)
    torch.manual_seed(6)
    p_logits = 1.5 * torch.randn(2, vocab)
    q_logits = p_logits[:1] + 0.8 * torch.randn(1, vocab)
    probs = to_probs(q_logits.to(GPU), params).expand(rows, 1, vocab)
    offer = proposal(draw(probs, generator), probs)
    verdict = verify(offer, p_logits.to(GPU).expand(rows, 2, vocab), params, generator)
    first = torch.where(verdict.accepted > 0, offer.tokens[:, 0], verdict.next_token)
    second = verdict.next_token[verdict.accepted > 0]
    for tokens, logits in ((first, p_logits[0]), (second, p_logits[1])):
        assert pvalue(tokens.cpu(), reference(logits, params)) > 1e-4


def test_a_bfloat16_checkpoint_decodes_and_keeps_its_float32_tensors(tmp_path: Path):
    save_k3(tmp_path, tiny_model(), experts="mxfp4")
    model = load_k3(tmp_path, dtype=torch.bfloat16, device=GPU)
    for name, tensor in model.state_dict().items():
        wanted = torch.float32 if layout.is_float32(name) else torch.bfloat16
        assert (tensor.dtype, tensor.device.type) == (wanted, "cuda"), name
    target, drafter = K3Target(model, "tiny", ()), drafter_on(GPU).bfloat16()
    for sampling in (GREEDY, SamplingParams(1.0)):
        text = SpeculativeDecoder(target, drafter).generate(
            [5, 6, 7], max_new_tokens=30, sampling=sampling, draft_length=5
        )
        assert len(text.tokens) == 30


def step_on(device: torch.device, precision: str) -> tuple[Tensor, Tensor]:
    """Loss sums and gradient of one optimiser step over ragged rows."""
    rows = [
        TrainingRow(tuple(tiny_tokens(1, n, seed=n)[0].tolist()), (False,) * 4 + (True,) * (n - 4))
        for n in (30, 12, 19)
    ]
    settings = TrainSettings(rows_per_step=3, micro_rows=2, anchors=6, precision=precision)
    drafter = drafter_on(device)
    trainer = Trainer(target_on(device), drafter, rows, settings, Processes(device))
    result = trainer.run_step(0)
    return to_vector(result.sums).cpu(), applied(trainer.optimiser.gradients).cpu()


def applied(gradients: FlatGradients | ApartGradients) -> Tensor:
    """What the update saw, in one vector."""
    if isinstance(gradients, FlatGradients):
        return gradients.buffer
    found = ((p, gradients.of(name, p)) for name, p in gradients.named)
    parts = [torch.zeros_like(p) if g is None else g.float() * gradients.scale for p, g in found]
    return torch.cat([part.flatten() for part in parts])


def test_a_training_step_is_that_of_the_cpu():
    sums, gradient = step_on(CPU, "fp32")
    for ours, expected in zip(step_on(GPU, "fp32"), (sums, gradient), strict=True):
        assert_close(ours, expected, dtype=torch.float32)
    half, _ = step_on(GPU, "bf16")
    assert torch.isfinite(half).all()
    assert (half - sums).abs().max() < 0.05 * sums.abs().max()
