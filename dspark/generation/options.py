"""The options of `dspark generate`, checked before anything is loaded."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from dspark.devices import check_device_name
from dspark.errors import UserError
from dspark.runtime.judge import Method
from dspark.runtime.policies.bands import SIBLINGS
from dspark.runtime.policies.choose import PolicyChoice
from dspark.runtime.sampling import SamplingParams
from dspark.seeds import check_seed

DTYPES = ("float32", "bfloat16", "float16")
_NOT_SHOWN = {"prompt", "draft", "svg", "cost_model", "threads", "device", "dtype"}


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(problem)


@dataclass(frozen=True)
class GenerateOptions:
    """One call of `dspark generate`.

    prompt        the text, or "-": it is read from stdin
    draft         folder of the drafter; None: plain decoding
    policy, draft_length, bands, siblings, cost_model   see `dspark.runtime.policies.choose`; a
                  number of siblings puts bands in force; None: the default, a whole block
    verification  "token" (None too) or "block"
    stop          strings that end the text; one that is a special token acts as an end token
    logit_bias    "ID:NUMBER" or "TEXT:NUMBER", where the text is one token
    raw           the prompt is the beginning of the text, not a user's turn
    graphs        decode by recorded frames, which apply no rules to the logits
    svg           picture of what --show-draft shows
    """

    prompt: str
    target: str = "nano"
    draft: Path | None = None
    policy: str | None = None
    draft_length: int | None = None
    bands: bool = False
    siblings: int | None = None
    cost_model: Path | None = None
    verification: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    logit_bias: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    seed: int = 0
    system: str | None = None
    raw: bool = False
    show_draft: bool = False
    stats: bool = False
    svg: Path | None = None
    graphs: bool = False
    json: bool = False
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        least = {
            "--max-new-tokens": (self.max_new_tokens, 1),
            "--min-new-tokens": (self.min_new_tokens, 0),
            "--no-repeat-ngram": (self.no_repeat_ngram, 0),
            "--siblings": (self.siblings or 0, 0),
            "--threads": (1 if self.threads is None else self.threads, 1),
        }
        for name, (value, low) in least.items():
            _require(value >= low, f"{name}: expected {low} or more; got {value}")
        check_seed("--seed", self.seed)
        _require(
            self.min_new_tokens <= self.max_new_tokens,
            f"--min-new-tokens {self.min_new_tokens}: more than --max-new-tokens "
            f"{self.max_new_tokens}",
        )
        _require(
            self.repetition_penalty > 0,
            f"--repetition-penalty: expected a number > 0; got {self.repetition_penalty}",
        )
        _require(
            self.dtype in DTYPES,
            f"--dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}",
        )
        check_device_name(self.device, "--device")
        self.sampling()
        self.choice()
        _require(
            self.verification in (None, *get_args(Method)),
            f"--verification: expected {' or '.join(get_args(Method))}; got {self.verification!r}",
        )
        self._check_combinations()

    def sampling(self) -> SamplingParams:
        """Raises UserError for values that are none."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    def command(self) -> str:
        """The command line that asks for this, without where files lie and what it runs on."""
        words = ["dspark", "generate", self.prompt]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in _NOT_SHOWN and value != option.default:
                words.append(f"--{option.name.replace('_', '-')}")
                values = value if isinstance(value, tuple) else (value,)
                words += [] if value is True else map(str, values)
        return shlex.join(words)

    def choice(self) -> PolicyChoice:
        """Raises UserError for a policy that is none."""
        return PolicyChoice(
            name=self.policy or "fixed",
            draft_length=self.draft_length,
            bands=self.bands or self.siblings is not None,
            siblings=SIBLINGS if self.siblings is None else self.siblings,
            graphs=self.graphs,
        )

    @property
    def reads_costs(self) -> bool:
        """Whether the policy decides by step times."""
        name = self.choice().name
        return name == "auto" or name.startswith("throughput")

    @property
    def method(self) -> Method:
        return "block" if self.verification == "block" else "token"

    def _check_combinations(self) -> None:
        """Refuse what would be ignored."""
        _require(
            self.system is None or not self.raw,
            "--system: --raw writes no chat, so there is no system message; leave one of them out",
        )
        _require(
            self.cost_model is None or self.draft is None or self.reads_costs,
            f"--cost-model: policy {self.choice().name} reads no step times; leave it out",
        )
        _require(self.svg is None or self.show_draft, "--svg: a picture of --show-draft; add that")
        _require(
            not (self.json and self.show_draft),
            "--json: prints one document, which --show-draft cannot colour; leave one of them out",
        )
        if self.graphs:
            self._check_graphs()
        if self.draft is None:
            given = {
                "--policy": self.policy,
                "--draft-length": self.draft_length,
                "--bands": self.bands or None,
                "--siblings": self.siblings,
                "--cost-model": self.cost_model,
                "--verification": self.verification,
                "--show-draft": self.show_draft or None,
            }
            for name, value in given.items():
                _require(value is None, f"{name}: needs a drafter; give --draft DIR")

    def _check_graphs(self) -> None:
        """What a frame, which waits for no host, does not do."""
        given = {
            "--bands": self.bands,
            "--siblings": self.siblings is not None,
            "--verification block": self.method == "block",
            "--min-new-tokens": self.min_new_tokens > 0,
            "--logit-bias": bool(self.logit_bias),
            "--repetition-penalty": self.repetition_penalty != 1,
            "--no-repeat-ngram": self.no_repeat_ngram > 0,
        }
        for name, asked in given.items():
            _require(not asked, f"{name}: recorded frames do not; leave --graphs out")
