"""How well a target solves held-out word problems.

    python -m dspark.nano.evaluate --target nano --problems 500 --temperature 0 --json result.json

Problem i of a seed is problem i of the test split, whose numbers its family never showed in
training. Each is asked once as a chat of one user turn and decoded plainly, in batches that do not
change its text. Definitions, over n answers of which k are right:

    exact            the text after the last ``####`` is the answer, character for character
    interval         Wilson, 95 %: (k + z^2/2 -+ z sqrt(k (n-k) / n + z^2/4)) / (n + z^2)
    ended            the last token is an end token, so nothing was cut off
    repeated 4-grams 1 - distinct / all token 4-grams of an answer, mean over answers; beside it the
                     same of the generator's own solutions, which repeat numbers and phrases too
    loops            more than 30 % of an answer's 8-grams are repeats, as in `dspark eval`
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dspark.console import Parser, module_command
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.loops import is_loop, repeated_share
from dspark.nano.generate import Problem, problem
from dspark.nano.grade import final_answer, is_correct
from dspark.nano.problems import FAMILIES
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.plain import generate_batch
from dspark.runtime.sampling import SamplingParams
from dspark.seeds import seed_argument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT = "test"
SEED = 77
MAX_NEW_TOKENS = 224
"""The longest of 5,000 held-out solutions has fewer than 150 tokens."""
_BATCH = 125
_Z95 = 1.959964
_TOPICS = {family.name: family.topic for family in FAMILIES}


@dataclass(frozen=True)
class Answer:
    """What the target wrote for one problem."""

    problem: Problem
    tokens: tuple[int, ...]
    text: str
    ended: bool

    @property
    def exact(self) -> bool:
        return is_correct(self.text, self.problem.answer)


@dataclass(frozen=True)
class Score:
    """`correct` of `total`, with rate and Wilson interval."""

    correct: int
    total: int

    @property
    def rate(self) -> float:
        return self.correct / self.total

    def record(self) -> dict[str, Any]:
        low, high = wilson(self.correct, self.total)
        return asdict(self) | {"rate": round(self.rate, 4), "ci95": [round(low, 4), round(high, 4)]}


def wilson(correct: int, total: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion; stays inside [0, 1] for 0 of n and n of n too."""
    centre = correct + z * z / 2
    half = z * math.sqrt(correct * (total - correct) / total + z * z / 4)
    low, high = (centre - half) / (total + z * z), (centre + half) / (total + z * z)
    return max(0.0, low), min(1.0, high)


def held_out(count: int, seed: int = SEED) -> list[Problem]:
    """The first `count` problems of the test split under `seed`."""
    if count < 1:
        raise UserError(f"problems: expected at least 1, got {count}")
    return [problem(seed, index, SPLIT) for index in range(count)]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[list[int]]:
    """Each question as a user turn with the generation prompt.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise UserError("the target's tokenizer has no chat template; a chat model is expected")
    chats = [[{"role": "user", "content": made.question}] for made in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def answer_problems(
    loaded: LoadedTarget,
    problems: Sequence[Problem],
    sampling: SamplingParams,
    *,
    seed: int = SEED,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Answer]:
    """Decode every problem; the answer to one depends on `seed` and its place alone."""
    prompts = prompt_ids(loaded.tokenizer, problems)
    texts: list[list[int]] = []
    for batch in _batches(len(prompts)):
        texts += generate_batch(
            loaded.target,
            prompts[batch.start : batch.stop],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            indices=batch,
        )
    ends = loaded.target.end_token_ids
    return [
        Answer(
            made,
            tuple(tokens),
            loaded.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens[-1] in ends,
        )
        for made, tokens in zip(problems, texts, strict=True)
    ]


def summarise(answers: Sequence[Answer], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """JSON-ready figures: overall, by number of steps and by family, and every wrong answer."""
    own = [answer.tokens for answer in answers]
    solutions = [answer.problem.solution for answer in answers]
    reference = tokenizer(solutions, add_special_tokens=False)["input_ids"]
    by_steps = _scores([(str(answer.problem.steps), answer.exact) for answer in answers])
    by_family = _scores([(answer.problem.family, answer.exact) for answer in answers])
    return {
        "exact": Score(sum(answer.exact for answer in answers), len(answers)).record(),
        "ended_share": _mean([answer.ended for answer in answers]),
        "mean_tokens": _mean([len(tokens) for tokens in own]),
        "repeated_4gram_share": _mean([repeated_share(tokens, 4) for tokens in own]),
        "repeated_4gram_share_of_solutions": _mean([repeated_share(ids, 4) for ids in reference]),
        "loop_share": _mean([is_loop(tokens) for tokens in own]),
        "steps": {name: score.record() for name, score in by_steps.items()},
        "families": {
            name: {"topic": _TOPICS[name]} | score.record() for name, score in by_family.items()
        },
        "wrong": [
            {
                "index": index,
                "family": answer.problem.family,
                "given": final_answer(answer.text),
                "right": answer.problem.answer,
            }
            for index, answer in enumerate(answers)
            if not answer.exact
        ],
    }


def evaluate(
    target: str, *, problems: int = 500, temperature: float = 0.0, seed: int = SEED
) -> dict[str, Any]:
    """Ask `target` the first `problems` held-out problems and summarise its answers.

    Raises UserError for a target that cannot be opened or a setting that cannot work.
    """
    sampling = SamplingParams(temperature)
    asked = held_out(problems, seed)
    loaded = load_target(target)
    answers = answer_problems(loaded, asked, sampling, seed=seed)
    return {
        "schema_version": 1,
        "target": target,
        "weights_sha256": _weights_digest(loaded.path),
        "split": SPLIT,
        "seed": seed,
        "temperature": temperature,
        "max_new_tokens": MAX_NEW_TOKENS,
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "device": str(loaded.target.device),
        "torch": torch.__version__,
    } | summarise(answers, loaded.tokenizer)


def print_summary(result: dict[str, Any], console: Console) -> None:
    """The overall figures, then one row per number of steps and per family that erred."""
    console.print(
        f"{result['target']}: {result['exact']['total']} held-out problems "
        f"(split {result['split']}, seed {result['seed']}) at temperature "
        f"{result['temperature']:g}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "exact", "of", "rate", "95 % interval"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    _add_score(table, "all problems", result["exact"], "bold")
    for steps, score in result["steps"].items():
        _add_score(table, f"{steps} step" + "s" * (steps != "1"), score)
    erring = {k: v for k, v in result["families"].items() if v["correct"] < v["total"]}
    for name, score in sorted(erring.items(), key=lambda item: item[1]["rate"]):
        _add_score(table, name, score)
    console.print(table)
    console.print(
        f"{len(result['families']) - len(erring)} of {len(result['families'])} families without "
        f"an error. Ended by the end token: {result['ended_share']:.1%}. Mean length: "
        f"{result['mean_tokens']:.1f} tokens. Repeated 4-grams: "
        f"{result['repeated_4gram_share']:.1%} (the generator's solutions: "
        f"{result['repeated_4gram_share_of_solutions']:.1%}). Loops: {result['loop_share']:.1%}.",
        highlight=False,
        soft_wrap=True,
    )


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure, print and write."""
    parser = Parser(
        prog="python -m dspark.nano.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="nano", help="shipped target or checkpoint folder")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument(
        "--seed", type=seed_argument, default=SEED, help="of the problems and the draws"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    result = evaluate(
        args.target, problems=args.problems, temperature=args.temperature, seed=args.seed
    )
    print_summary(result, Console())
    if args.json is not None:
        atomic_write_json(args.json, result)


def _add_score(table: Table, name: str, score: dict[str, Any], style: str | None = None) -> None:
    low, high = score["ci95"]
    interval = f"{low:.1%} to {high:.1%}"
    counts = (str(score["correct"]), str(score["total"]))
    table.add_row(name, *counts, f"{score['rate']:.1%}", interval, style=style)


def _scores(outcomes: Sequence[tuple[str, bool]]) -> dict[str, Score]:
    """Scores by name, names in order."""
    grouped: defaultdict[str, list[bool]] = defaultdict(list)
    for name, exact in outcomes:
        grouped[name].append(exact)
    return {name: Score(sum(grouped[name]), len(grouped[name])) for name in sorted(grouped)}


def _batches(count: int) -> Iterator[range]:
    """Ranges of at most `_BATCH` places, behind a progress bar that only a terminal sees."""
    batches = [range(i, min(i + _BATCH, count)) for i in range(0, count, _BATCH)]
    console = Console(stderr=True)
    yield from track(
        batches, "answering", console=console, disable=not console.is_terminal, transient=True
    )


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _weights_digest(folder: Path) -> str:
    """SHA-256 over the weight files in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
