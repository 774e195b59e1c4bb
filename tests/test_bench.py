"""`dspark bench`: the arithmetic on scripted answers, then a whole run on a tiny random pair."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.identity import identity_warnings
from dspark.draft.record import TargetRecord
from dspark.errors import UserError
from dspark.runtime.asked import check_draft_length
from dspark.runtime.records import Generation, RoundRecord
from dspark_eval import speed
from dspark_eval.bench import run_bench
from dspark_eval.document import RUN_KEYS
from dspark_eval.lengths import require_proposals
from dspark_eval.mismatches import find_mismatches, first_divergence
from dspark_eval.pair import load_pair
from dspark_eval.settings import BenchOptions
from dspark_eval.speed import PromptTimings
from dspark_eval.transformers_peer import TransformersPeer, kimi_linear_settings
from tests import chat_tokenizers
from tests.k3_tiny import PLAIN, TINY
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair
from tests.toy_target import ToyTarget

# the keys that the design promises to whoever reads the file
PROMISED = [
    "schema_version",
    "target",
    "drafter",
    "batch",
    "policy",
    "policy_settings",
    "verification",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "n_prompts",
    "plain_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
    "speedup_ci95",
    "accepted_length",
    "accepted_length_ci95",
    "acceptance_rate",
    "acceptance_rate_with_bonus",
    "conditional_acceptance",
    "sibling_rate",
    "draft_length_mean",
    "rows_per_round",
    "levels",
    "bands",
    "relaxed",
    "break_even",
    "draft_ms",
    "verify_ms",
    "other_ms",
    "frame_ms_p50",
    "frame_ms_p99",
    "host_syncs_per_token",
    "greedy_mismatches",
    "backends",
    "environment",
]


def plain_answer(tokens: int, seconds: float) -> Generation:
    return Generation(list(range(tokens)), "length", prefill_s=1.0, decode_s=seconds)


def fast_answer(rounds: int, k: int, a: int, seconds: float) -> Generation:
    each = seconds / rounds
    record = RoundRecord(k, k, a, a + 1, 2, each / 4, each / 2, each / 4, (0.5,) * k, (1.0,) * k)
    tokens = list(range(1 + rounds * (a + 1)))
    return Generation(tokens, "length", 1.0, seconds, [record] * rounds)


# ------------------------------------------------------------------ arithmetic


def test_ways_alternate_and_seeds_differ_between_prompts_and_repeats():
    calls: list[tuple[str, int, int]] = []

    def plain(prompt: list[int], seed: int) -> Generation:
        calls.append(("plain", prompt[0], seed))
        return plain_answer(5, 1.0)

    def fast(prompt: list[int], seed: int) -> Generation:
        calls.append(("fast", prompt[0], seed))
        return fast_answer(2, 3, 1, 1.0)

    timings = speed.measure(
        [[0], [1], [2]], speed.alone(plain), speed.alone(fast), repeats=2, seed=100
    )
    assert [way for way, _, _ in calls] == ["plain", "fast", "fast", "plain"] * 3
    assert [seed for _, _, seed in calls[::2]] == [100, 101, 102, 103, 104, 105]
    assert all(calls[i][1:] == calls[i + 1][1:] for i in range(0, 12, 2))
    assert [len(t.plain) for t in timings] == [len(t.speculative) for t in timings] == [2, 2, 2]


def test_rates_are_pooled_and_leave_the_first_token_out():
    """Plain 10 and 30 tokens in 1 s and 3 s: 40 / 4. Speculative 2 rounds of 5 in 0.5 s: 20 / 1."""
    timings = [
        PromptTimings(7, [plain_answer(11, 1.0)], [fast_answer(2, 4, 4, 0.5)]),
        PromptTimings(9, [plain_answer(31, 3.0)], [fast_answer(2, 4, 4, 0.5)]),
    ]
    result = speed.summarize(timings, seed=0)
    assert result["plain_tokens_per_s"] == pytest.approx(10)
    assert result["speculative_tokens_per_s"] == pytest.approx(20)
    assert result["speedup"] == pytest.approx(2)
    assert result["speedup_ci95"] == pytest.approx((2, 2))  # both prompts have the same ratio
    assert result["accepted_length"] == 5
    assert (result["draft_ms"], result["verify_ms"], result["other_ms"]) == pytest.approx(
        (62.5, 125, 62.5)
    )
    # a round costs 250 ms, a plain step 100 ms: with 2.5 tokens per round both are as fast
    assert result["break_even"] == pytest.approx(2.5)
    extra = speed.details(timings, seed=0)
    assert extra["plain_tokens_per_s_with_prefill"] == pytest.approx(42 / 6)
    assert extra["speedup_with_prefill"] == pytest.approx((22 / 3) / (42 / 6))


def test_interval_keeps_both_measurements_of_a_prompt_together():
    """Prompts of very different speed, each exactly 3x faster: the ratio has no spread."""
    timings = [
        PromptTimings(5, [plain_answer(31, 0.3 * slow)], [fast_answer(10, 2, 2, 0.1 * slow)])
        for slow in (1.0, 2.0, 5.0, 20.0)
    ]
    result = speed.summarize(timings, seed=1)
    assert result["speedup_ci95"] == pytest.approx((3, 3))
    low, high = speed.details(timings, seed=1)["plain_tokens_per_s_ci95"]
    assert high > 2 * low


def test_plain_decoding_that_was_not_measured_is_null():
    result = speed.summarize([PromptTimings(5, [], [fast_answer(2, 3, 1, 1.0)])], seed=0)
    assert result["plain_tokens_per_s"] is None
    assert result["speedup"] is None
    assert result["speedup_ci95"] is None
    assert result["accepted_length"] == 2


def test_a_drafter_that_never_proposes_is_an_error():
    silent = PromptTimings(5, [plain_answer(5, 1.0)], [fast_answer(4, 0, 0, 1.0)])
    with pytest.raises(UserError, match="never proposed"):
        require_proposals([silent], "runs/mine")
    with pytest.raises(UserError, match="no round"):
        require_proposals([PromptTimings(5, [plain_answer(1, 0.0)], [plain_answer(1, 0.0)])], "x")


def test_first_divergence():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([], [4]) == 0


def test_mismatch_names_position_and_the_gap_of_the_top_two_logits():
    target, prompt = ToyTarget(), [5, 6, 7]
    entry = PromptTimings(3)
    entry.plain.append(Generation([10, 11, 12], "length", 0.1, 0.1))
    entry.speculative.append(Generation([10, 13, 12], "length", 0.1, 0.1))
    (found,) = find_mismatches(target, [prompt], [entry])
    best = target.logits(target.states(torch.tensor([5, 6, 7, 10]))[-1]).topk(2).values
    assert (found.prompt, found.position) == (0, 1)
    assert (found.plain_token, found.speculative_token) == (11, 13)
    assert found.top2_gap == pytest.approx(float(best[0] - best[1]), rel=1e-5)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 2}, "--batch"),
        ({"policy": "lucky"}, "--policy"),
        ({"max_new_tokens": 1}, "--max-new-tokens"),
        ({"n_prompts": 0}, "--n-prompts"),
        ({"warmup": 0}, "--warmup"),
        ({"repeats": 0}, "--repeats"),
        ({"draft_length": 0}, "--draft-length"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda:x"}, "--device: expected cpu, cuda or cuda:N"),
        ({"threads": 0}, "--threads"),
        ({"temperature": ()}, "--temperature"),
        ({"temperature": (0.0, 0.0)}, "--temperature"),
        ({"temperature": (-1.0,)}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"plot": Path("speed.bmp")}, "--plot speed.bmp"),
        ({"plot": Path("speed")}, "--plot speed"),
        ({"plot": Path(__file__, "speed.png")}, "--plot: .*test_bench.py is a file"),
        ({"json": Path(__file__).parent}, "--json .*this is a folder"),
    ],
)
def test_wrong_options_are_named(change, named):
    with pytest.raises(UserError, match=named):
        BenchOptions(draft="runs/mine", **change)


def test_draft_length_stays_within_the_trained_block():
    assert check_draft_length(None, 8) == 8
    assert [check_draft_length(k, 8) for k in (1, 2, 8)] == [1, 2, 8]
    with pytest.raises(UserError, match=r"1\.\.8"):
        check_draft_length(9, 8)


def test_a_drafter_of_another_tokenizer_or_template_is_warned_about():
    chat = ChatFormat(chat_tokenizers.k3())
    same = TargetRecord("nano", tokenizer_fingerprint(chat.tokenizer), chat.fingerprint)
    assert identity_warnings(None, chat) == []
    assert identity_warnings(TargetRecord("nano"), chat) == []
    assert identity_warnings(same, chat) == []
    other = dataclasses.replace(same, tokenizer_hash="0" * 64)
    assert "tokenizer" in identity_warnings(other, chat)[0]
    other = dataclasses.replace(same, template_hash="0" * 64)
    assert "chat template" in identity_warnings(other, chat)[0]


# ------------------------------------------------------------------ the peer


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])
def test_peer_has_the_shape_of_the_target(config):
    settings = kimi_linear_settings(config)
    full = [i for i, kind in enumerate(settings["layer_types"]) if kind == "full_attention"]
    assert tuple(full) == config.full_attention_layers
    assert settings["mlp_layer_types"] == ["dense"] + ["sparse"] * 6
    ours = config.moe_intermediate_size * config.expert_width
    assert settings["moe_intermediate_size"] * config.hidden_size == ours
    peer = TransformersPeer(config, device=torch.device("cpu"), dtype=torch.float32)
    model = peer.model.config
    assert model.layer_types == settings["layer_types"]
    assert (model.hidden_size, model.vocab_size) == (config.hidden_size, config.vocab_size)
    assert (model.kv_lora_rank, model.q_lora_rank) == (config.kv_lora_rank, config.q_lora_rank)
    assert (model.linear_num_heads, model.linear_head_dim) == (3, 16)


def test_peer_makes_exactly_the_tokens_asked_for():
    peer = TransformersPeer(PLAIN, device=torch.device("cpu"), dtype=torch.float32)
    timing = peer.measure(prompt_length=5, n_tokens=4)
    assert timing.tokens == 3
    assert timing.decode_s > 0
    assert timing.prefill_s > 0


# ------------------------------------------------------------------ the whole command


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def options(pair: TinyPair, **change) -> BenchOptions:
    values = {"max_new_tokens": 8, "warmup": 1, "quiet": True, **change}
    return BenchOptions(draft=pair.draft, target=pair.target, prompts=pair.prompts, **values)


@pytest.fixture(scope="module")
def measured(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("out")
    both = options(pair, temperature=(0.0, 1.0), peer=True, json=out / "b.json", plot=out / "b.png")
    return run_bench(both), out


def test_json_has_every_promised_key_in_each_run_and_at_the_top(measured):
    document, out = measured
    assert list(RUN_KEYS) == PROMISED
    assert [*PROMISED, "extra", "runs"] == list(document)
    for run in document["runs"]:
        assert [*PROMISED, "extra"] == list(run)
    assert {key: document[key] for key in PROMISED} == {
        key: document["runs"][0][key] for key in PROMISED
    }
    assert json.loads((out / "b.json").read_text()) == json.loads(json.dumps(document))


def test_values_of_a_run(measured, pair):
    greedy, sampled = measured[0]["runs"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 1.0)
    assert greedy["greedy_mismatches"] == 0  # float32: the same text, token for token
    assert greedy["extra"]["mismatches"] == []
    assert greedy["extra"]["plain_sha256"] == greedy["extra"]["speculative_sha256"]
    assert greedy["plain_tokens_per_s"] > 0
    assert greedy["speedup"] == pytest.approx(
        greedy["speculative_tokens_per_s"] / greedy["plain_tokens_per_s"]
    )
    low, high = greedy["speedup_ci95"]
    assert low <= greedy["speedup"] <= high
    assert 1 <= sampled["accepted_length"] <= BLOCK_SIZE + 1
    assert len(greedy["conditional_acceptance"]) == BLOCK_SIZE
    assert greedy["n_prompts"] == 3
    assert greedy["backends"].items() >= {"kda_chunk": "torch", "kda_step": "torch"}.items()
    assert greedy["environment"]["torch"] == torch.__version__
    assert greedy["target"] == str(pair.target)
    assert greedy["drafter"] == str(pair.draft)
    peer = greedy["extra"]["peer"]
    assert peer["n_prompts"] == 3
    assert peer["plain_over_peer"] == pytest.approx(
        peer["plain_tokens_per_s"] / peer["tokens_per_s"]
    )
    assert any("few prompts (3)" in line for line in greedy["extra"]["warnings"])


def test_not_measured_is_null(measured):
    greedy, sampled = measured[0]["runs"]
    assert greedy["host_syncs_per_token"] is None
    assert sampled["greedy_mismatches"] is None
    assert sampled["extra"]["mismatches"] is None
    assert greedy["extra"]["lossless"] is None  # plain decoding's text is what it has to be
    held = sampled["extra"]["lossless"]
    assert (held["method"], held["impossible"]) == ("sampling", 0)
    assert held["passed"] is not False
    assert held["tokens"] == sampled["extra"]["speculative_tokens"]
    assert sampled["extra"]["peer"] is None


def test_picture_is_a_png(measured):
    assert (measured[1] / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draft_length", [1, 2, BLOCK_SIZE])
def test_every_draft_length_of_the_block_runs(pair, draft_length):
    """A single temperature gives the flat document without `runs`."""
    document = run_bench(options(pair, draft_length=draft_length, n_prompts=1))
    assert "runs" not in document
    assert document["extra"]["draft_length"] == draft_length
    assert len(document["conditional_acceptance"]) == draft_length
    assert document["greedy_mismatches"] == 0
    assert document["speedup_ci95"] is None  # one prompt has no spread


def test_longer_than_the_block_is_refused(pair):
    with pytest.raises(UserError, match=rf"1\.\.{BLOCK_SIZE}"):
        run_bench(options(pair, draft_length=BLOCK_SIZE + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_drafter_stored_in_low_precision_proposes(tmp_path, dtype):
    low = write_pair(tmp_path, dtype=dtype)
    assert run_bench(options(low, n_prompts=1))["draft_length_mean"] > 0


def test_table_shows_every_setting_and_the_peer(measured, capsys):
    from dspark_eval.report import print_bench

    print_bench(measured[0]["runs"])
    shown = capsys.readouterr().out
    for text in (
        "plain, temperature 0",
        "speculative, temperature 1",
        "transformers generate",
        "accepted length",
        "kda_step torch",
        "warning: few prompts (3)",
    ):
        assert text in shown


def test_two_prompt_sets_are_refused(pair):
    with pytest.raises(UserError, match="nano-problems or nano-instructions"):
        run_bench(dataclasses.replace(options(pair), prompts="nano"))


def test_a_missing_drafter_is_named_before_the_target_is_opened(pair, tmp_path):
    missing = dataclasses.replace(options(pair), draft=tmp_path / "no", target=tmp_path / "none")
    with pytest.raises(UserError, match="no: no such folder"):
        load_pair(missing)


def test_a_gpu_that_is_not_there_is_said_plainly(pair):
    with pytest.raises(UserError, match="--device cuda:99: "):
        load_pair(options(pair, device="cuda:99"))
