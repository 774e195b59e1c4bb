"""The options of `dspark bench` and `dspark eval`, checked before anything is loaded.

A wrong value raises `UserError` here, so that a typing mistake costs a second and not the minute
that loading a target takes, nor a measurement that cannot be written. What depends on the drafter
(draft length against block size) is checked once its config is read, by `pair.load_pair`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dspark.runtime.policies.choose import PolicyChoice
from dspark.runtime.sampling import SamplingParams
from dspark_eval.asked import AtTemperatures, check_file, check_folder, require
from dspark_eval.drafting import Drafting
from dspark_eval.protocols import check_protocol

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Drafting, AtTemperatures):
    """One call of `dspark bench`.

    prompts: a suite name or a JSONL file. draft_length: None = the drafter's block size.
    repeats: times each prompt is measured. warmup: prompts decoded before the clock counts.
    peer: also measure transformers' `generate` on a `kimi_linear` model of equal shape.
    graphs: both ways by recorded frames; then batch prompts are decoded side by side.
    """

    prompts: str | Path = "nano-problems"
    n_prompts: int = 60
    batch: int = 1
    temperature: tuple[float, ...] = (0.0,)
    warmup: int = 2
    repeats: int = 1
    peer: bool = False
    graphs: bool = False
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        self.check()
        require(self.batch >= 1, f"--batch: expected 1 or more; got {self.batch}")
        self._check_graphs()
        require(self.warmup >= 1, f"--warmup: expected 1 or more; got {self.warmup}")
        require(self.repeats >= 1, f"--repeats: expected 1 or more; got {self.repeats}")
        self.sampling()
        check_file("--json", self.json)
        check_file("--plot", self.plot)
        require(
            self.plot is None or self.plot.suffix.lower() in PICTURES,
            f"--plot {self.plot}: expected a name that ends in {', '.join(PICTURES)}",
        )

    def choice(self) -> PolicyChoice:
        return replace(super().choice(), graphs=self.graphs)

    def _check_graphs(self) -> None:
        """What only recorded frames do, and what they do not."""
        one = self.batch == 1
        require(one or self.graphs, f"--batch: expected 1, or --graphs with it; got {self.batch}")
        require(one or not self.peer, "--peer: decodes one prompt at a time; leave --batch out")
        if self.graphs:
            for name, asked in (
                ("--bands", self.bands),
                ("--verification block", self.verification != "token"),
                ("--relaxed", self.relaxed),
            ):
                require(not asked, f"{name}: recorded frames do not; leave --graphs out")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Drafting):
    """One call of `dspark eval`.

    suites: suite names or JSONL files, each reported on its own. n_prompts: at most this many of
    each set, drawn with `seed`; None: see `load_suites`. out: folder for eval.json and
    acceptance.png, None = print only. suite_dir: files of public sets. protocol: see `protocols`.
    turns: of a conversation, None = all. plain: conversations of each set that plain decoding
    answers too. check_texts: hold every text against the target. run_code: run model-written code.
    concurrency: batch sizes at which both ways of decoding are timed. rounds: file of every round.
    command: the command line, kept beside the numbers.
    """

    suites: tuple[str, ...] = ("nano",)
    n_prompts: int | None = 100
    temperature: float = 0.0
    out: Path | None = None
    suite_dir: Path | None = None
    protocol: str | None = None
    turns: int | None = None
    plain: int = 0
    check_texts: bool = True
    run_code: bool = False
    concurrency: tuple[int, ...] = ()
    rounds: Path | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        self.check()
        require(len(self.suites) > 0, "--suite: expected at least one suite name or JSONL file")
        require(
            self.turns is None or self.turns >= 1,
            f"--turns: expected 1 or more; got {self.turns}",
        )
        require(self.plain >= 0, f"--plain: expected 0 or more; got {self.plain}")
        require(
            all(size >= 1 for size in self.concurrency),
            f"--concurrency: expected 1 or more; got {', '.join(map(str, self.concurrency))}",
        )
        check_protocol(self.protocol, self)
        self.sampling()
        if self.out is not None:
            check_folder("--out", self.out)
        check_file("--rounds", self.rounds)

    def sampling(self) -> SamplingParams:
        """The sampling parameters of the run."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(AtTemperatures):
    """One call of `dspark calibrate`.

    suites: suite names or JSONL files that the drafter was not trained on, taken together.
    temperature: one entry is fitted for each value. out: folder for reliability.json and the
    pictures, None = the drafter's. sglang: folder for files in SGLang's formats. cost_model: step
    times, for thresholds of draft-length policies and SGLang's cost table; profile: measure them
    now and write them there. Without either, what lies beside the drafter. replace: also entries
    that were fitted on more prompts.
    """

    suites: tuple[str, ...] = ("nano-validation",)
    n_prompts: int = 200
    temperature: tuple[float, ...] = (0.0, 1.0)
    out: Path | None = None
    sglang: Path | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        self.check()
        require(
            self.n_prompts >= 2,
            f"--n-prompts: expected 2 or more, half are fitted on and half judged; "
            f"got {self.n_prompts}",
        )
        require(len(self.suites) > 0, "--suite: expected at least one suite name or JSONL file")
        self.sampling()
        for name, folder in (("--out", self.out), ("--sglang", self.sglang)):
            if folder is not None:
                check_folder(name, folder)

    @property
    def draft_length(self) -> int | None:
        """Whole blocks: every slot is judged."""
        return None
