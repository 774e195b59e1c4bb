"""The options of `dspark bench` and `dspark eval`, checked before anything is loaded.

A wrong value raises `UserError` here, so that a typing mistake costs a second and not the minute
that loading a target takes, nor a measurement that cannot be written. What depends on the drafter
(draft length against block size) is checked once its config is read, by `pair.load_pair`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dspark.devices import check_device_name
from dspark.errors import UserError
from dspark.runtime.sampling import SamplingParams
from dspark_eval.drafting import Drafting
from dspark_eval.protocols import check_protocol

DTYPES = ("float32", "bfloat16", "float16")
PICTURES = (".png", ".svg", ".pdf")
PUBLISHED_SEED = 980406  # the seed of DeepSpec's evaluation, for numbers to be set beside its own


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(problem)


def _check_file(name: str, path: Path | None) -> None:
    """Refuse an output file that could not be written once everything is measured."""
    if path is not None:
        _require(not path.is_dir(), f"{name} {path}: expected a file; this is a folder")
        _check_folder(name, path.parent)


def _check_folder(name: str, path: Path) -> None:
    existing = next(p for p in (path, *path.parents) if p.exists())
    _require(existing.is_dir(), f"{name}: {existing} is a file; a folder is needed there")


def _check_shared(options: BenchOptions | EvalOptions | CalibrateOptions) -> None:
    """What both commands ask of the options they have in common."""
    _require(bool(str(options.draft)), "--draft: expected the folder of a drafter; got nothing")
    _require(
        options.draft_length is None or options.draft_length >= 1,
        f"--draft-length: expected 1 or more; got {options.draft_length}",
    )
    _require(
        options.max_new_tokens >= 2,
        f"--max-new-tokens: expected 2 or more, the first token is not decoded by a round; "
        f"got {options.max_new_tokens}",
    )
    _require(
        options.n_prompts is None or options.n_prompts >= 1,
        f"--n-prompts: expected 1 or more; got {options.n_prompts}",
    )
    _require(
        options.threads is None or options.threads >= 1,
        f"--threads: expected 1 or more; got {options.threads}",
    )
    cores = os.cpu_count() or 1
    _require(
        options.threads is None or options.threads <= cores,
        f"--threads: expected at most {cores}, the cores of this machine; got {options.threads}",
    )
    _require(options.seed >= 0, f"--seed: expected 0 or more; got {options.seed}")
    _require(
        options.dtype in DTYPES,
        f"--dtype: expected one of {', '.join(DTYPES)}; got {options.dtype!r}",
    )
    check_device_name(options.device, "--device")
    if options.profile:
        _check_file("--cost-model", options.cost_model)
    if isinstance(options, Drafting):
        options.check()


def _check_temperatures(values: tuple[float, ...]) -> None:
    _require(len(values) > 0, "--temperature: expected at least one value")
    _require(
        len(set(values)) == len(values),
        f"--temperature: each value once; got {', '.join(map(str, values))}",
    )


@dataclass(frozen=True)
class BenchOptions(Drafting):
    """One call of `dspark bench`.

    draft: folder of the drafter. target: "nano" or a checkpoint folder. prompts: a suite name or a
    JSONL file. temperature: one run for each value. draft_length: None = the drafter's block size.
    repeats: times each prompt is measured. warmup: prompts decoded before the clock counts.
    peer: also measure transformers' `generate` on a `kimi_linear` model of equal shape.
    """

    draft: str | Path
    target: str | Path = "nano"
    prompts: str | Path = "nano-problems"
    n_prompts: int = 60
    max_new_tokens: int = 256
    batch: int = 1
    temperature: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = PUBLISHED_SEED
    warmup: int = 2
    repeats: int = 1
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    peer: bool = False
    json: Path | None = None
    plot: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        _check_shared(self)
        _require(self.batch == 1, f"--batch: expected 1, the batch size measured; got {self.batch}")
        _require(self.warmup >= 1, f"--warmup: expected 1 or more; got {self.warmup}")
        _require(self.repeats >= 1, f"--repeats: expected 1 or more; got {self.repeats}")
        _check_temperatures(self.temperature)
        self.sampling()
        _check_file("--json", self.json)
        _check_file("--plot", self.plot)
        _require(
            self.plot is None or self.plot.suffix.lower() in PICTURES,
            f"--plot {self.plot}: expected a name that ends in {', '.join(PICTURES)}",
        )

    def sampling(self) -> tuple[SamplingParams, ...]:
        """The sampling parameters of each run, in the order asked for."""
        return tuple(
            SamplingParams(temperature=value, top_p=self.top_p, top_k=self.top_k)
            for value in self.temperature
        )


@dataclass(frozen=True)
class EvalOptions(Drafting):
    """One call of `dspark eval`.

    suites: suite names or JSONL files, each reported on its own. n_prompts: at most this many of
    each set, drawn with `seed`; None: see `load_suites`. out: folder for eval.json and
    acceptance.png, None = print only. suite_dir: files of public sets. protocol: see `protocols`.
    turns: of a conversation, None = all. plain: conversations of each set that plain decoding
    answers too. check_texts: hold every text against the target. run_code: run model-written code.
    concurrency: batch sizes at which both ways of decoding are timed.
    """

    draft: str | Path
    target: str | Path = "nano"
    suites: tuple[str, ...] = ("nano",)
    n_prompts: int | None = 100
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = PUBLISHED_SEED
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    out: Path | None = None
    quiet: bool = False
    suite_dir: Path | None = None
    protocol: str | None = None
    turns: int | None = None
    plain: int = 0
    check_texts: bool = True
    run_code: bool = False
    concurrency: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_shared(self)
        _require(len(self.suites) > 0, "--suite: expected at least one suite name or JSONL file")
        _require(
            self.turns is None or self.turns >= 1,
            f"--turns: expected 1 or more; got {self.turns}",
        )
        _require(self.plain >= 0, f"--plain: expected 0 or more; got {self.plain}")
        _require(
            all(size >= 1 for size in self.concurrency),
            f"--concurrency: expected 1 or more; got {', '.join(map(str, self.concurrency))}",
        )
        check_protocol(self.protocol, self)
        self.sampling()
        if self.out is not None:
            _check_folder("--out", self.out)

    def sampling(self) -> SamplingParams:
        """The sampling parameters of the run."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True)
class CalibrateOptions:
    """One call of `dspark calibrate`.

    suites: suite names or JSONL files that the drafter was not trained on, taken together.
    temperature: one entry is fitted for each value. out: folder for reliability.json and the
    pictures, None = the drafter's. sglang: folder for files in SGLang's formats. cost_model: step
    times, for thresholds of draft-length policies and SGLang's cost table; profile: measure them
    now and write them there. Without either, what lies beside the drafter.
    """

    draft: str | Path
    target: str | Path = "nano"
    suites: tuple[str, ...] = ("nano-validation",)
    n_prompts: int = 200
    max_new_tokens: int = 256
    temperature: tuple[float, ...] = (0.0, 1.0)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = PUBLISHED_SEED
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    out: Path | None = None
    sglang: Path | None = None
    cost_model: Path | None = None
    profile: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        _check_shared(self)
        _require(
            self.n_prompts >= 2,
            f"--n-prompts: expected 2 or more, half are fitted on and half judged; "
            f"got {self.n_prompts}",
        )
        _require(len(self.suites) > 0, "--suite: expected at least one suite name or JSONL file")
        _check_temperatures(self.temperature)
        self.sampling()
        for name, folder in (("--out", self.out), ("--sglang", self.sglang)):
            if folder is not None:
                _check_folder(name, folder)

    @property
    def draft_length(self) -> int | None:
        """Whole blocks: every slot is judged."""
        return None

    def sampling(self) -> tuple[SamplingParams, ...]:
        """The sampling settings to fit, in the order asked for."""
        return tuple(
            SamplingParams(temperature=value, top_p=self.top_p, top_k=self.top_k)
            for value in self.temperature
        )
