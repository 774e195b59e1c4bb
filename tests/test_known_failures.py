"""docs/known_failures.md names tests that exist, and the failures that no other file tests."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.processes import Processes
from dspark.distill.prompts import read_prompts
from dspark.distill.responses import ResponseSettings, build_rows
from dspark.distill.trainer import Trainer
from dspark_eval.pair import Pair
from dspark_eval.suites import load_suites
from tests import chat_tokenizers as small
from tests.distill_setup import ALONE, config, rows, run, same, trainer, weights
from tests.test_distributed import on_ranks
from tests.test_responses import target_of
from tests.toy_target import ToyTarget

REPO = Path(__file__).resolve().parent.parent
PAGE = (REPO / "docs" / "known_failures.md").read_text(encoding="utf-8")
ENTRIES = [line for line in PAGE.splitlines() if line.startswith("|") and "](http" in line]


def functions_of(name: str) -> set[str]:
    tree = ast.parse((REPO / "tests" / name).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.split("|")[1].strip()[:40])
def test_every_entry_names_tests_that_exist(entry: str) -> None:
    what, where, held = (cell.strip() for cell in entry.strip("|").split("|"))
    assert what
    assert re.fullmatch(r"(\[[\w.-]+#\d+\]\(https://github\.com/[\w./-]+/\d+\)(, )?)+", where)
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", held)
    assert named
    assert len(named) == held.count("::")
    for file, test in named:
        assert test in functions_of(file), f"{file}::{test}"


def test_the_page_is_a_list_without_repetition() -> None:
    titles = [entry.split("|")[1] for entry in ENTRIES]
    assert len(titles) == len(set(titles))
    assert len(titles) >= 38


# -- data ------------------------------------------------------------------------------------------


def test_odd_text_is_asked_alike_in_training_and_in_measuring(tmp_path: Path) -> None:
    """Surrogates, emoji, NUL, marks of direction, byte order mark and CRLF, on both paths."""
    texts = [
        "half \\ud83d pair",
        "👩‍🚀 \\u0000 nul",
        "\\u202eabc\\u202c",
        "2024-05-01",
        "line\\u2028sep",
    ]
    lines = "\r\n".join(f'{{"prompt": "{text}"}}' for text in texts)
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    tokenizer = small.k3()
    target = target_of(tokenizer, "<|end_of_msg|>")
    prompts = read_prompts([path])
    trained = build_rows(target, tokenizer, prompts.rows, ResponseSettings(max_new_tokens=3))
    (suite,) = load_suites(path, n_prompts=9, seed=0)
    chat = ChatFormat(tokenizer)
    pair = Pair(target, drafter=None, chat=chat, drafter_name="", draft_length=1)  # type: ignore[arg-type]
    measured = {row.line: ids for row, ids in zip(suite.rows, pair.prompt_ids(suite), strict=True)}
    assert len(trained.rows) == len(texts)
    for row in trained.rows:
        assert list(row.ids[: row.loss_mask.index(True)]) == measured[row.line]
        text = json.loads(f'"{texts[row.line - 1]}"').replace("\ud83d", "\ufffd")
        assert text in chat.decode(measured[row.line])


# -- training --------------------------------------------------------------------------------------


def described(made: Trainer) -> dict[str, Any]:
    """What a trainer trains, in which precision, and under which settings."""
    return {
        "settings": made.settings,
        "parameters": {
            name: (tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in made.drafter.named_parameters()
        },
        "moments": {
            name: (tuple(t.shape), t.dtype) for name, t in made.optimiser.state_tensors().items()
        },
        "config": made.drafter.config,
    }


def test_a_resumed_run_trains_what_the_first_one_did(tmp_path: Path) -> None:
    """Every option off its default: the description of step 7 is that of a run without a stop."""
    changed: dict[str, Any] = {
        "train__precision": "bf16", "train__confidence_detach": False, "train__ce": 0.1,
        "train__confidence": 0.3, "train__weight_decay": 0.1, "train__clip": 0.5,
        "train__decay": 2.0, "train__micro_rows": 2, "train__keep_gib": 0.0, "train__kl": 0.2,
    }  # fmt: skip
    seen: dict[str, dict[int, Any]] = {"straight": {}, "resumed": {}}

    def watch(into: str, stop: int | None = None) -> Any:
        def on_step(made: Trainer, step: int) -> None:
            seen[into][step] = described(made)
            made.stop_requested = made.stop_requested or step == stop

        return on_step

    run(config(tmp_path / "a", **changed), on_step=watch("straight"))
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path / "b", **changed), on_step=watch("resumed", stop=5))
    run(config(tmp_path / "b", **changed), on_step=watch("resumed"))
    assert sorted(seen["resumed"]) == sorted(seen["straight"]) == list(range(12))
    assert seen["resumed"][7] == seen["straight"][7]
    kinds = {dtype for _, dtype, _ in seen["resumed"][7]["parameters"].values()}
    assert kinds == {torch.float32}


def test_training_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of many lengths, with torch's compiler out of reach."""

    def refuse(*args: object, **rest: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(torch.nn.Module, "compile", refuse)
    target = ToyTarget()
    data = [row for length in range(14, 26) for row in rows(target, 1, length)]
    made = trainer(target=target, training_rows=data, rows_per_step=1, micro_rows=1, epochs=1)
    for step in range(len(data)):
        made.run_step(step)


def switched_off(processes: Processes) -> dict[str, torch.Tensor]:
    """Weights after three steps on tokens alone, with a head whose loss weighs nothing."""
    made = trainer(ce=1.0, tv=0.0, confidence=0.0, epochs=3, processes=processes)
    for step in range(3):
        made.run_step(step)
    return weights(made)


@pytest.mark.slow
def test_losses_switched_off_need_nothing_on_any_number_of_ranks() -> None:
    before = weights(trainer(ce=1.0, tv=0.0, confidence=0.0))
    alone = switched_off(ALONE)
    first, second = on_ranks(2, switched_off)
    assert same(first, second)
    for name, tensor in alone.items():
        if name.startswith("confidence_head"):
            assert torch.equal(tensor, before[name])
            assert torch.equal(first[name], before[name])
        else:
            assert not torch.equal(tensor, before[name])
            # Adam's first updates have the size of the rate whatever the gradient, so rounding in a
            # near-zero gradient may turn one entry; 3 steps of 5e-3 bound what that can do.
            assert (first[name] - tensor).abs().mean() < 5e-4, name
