"""What every command that decodes prompts is told, and what is asked of it.

`settings.py` adds what is one command's own. A wrong value raises `UserError` naming the option.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dspark.devices import check_device_name
from dspark.errors import UserError
from dspark.runtime.sampling import SamplingParams
from dspark.seeds import check_seed

DTYPES = ("float32", "bfloat16", "float16")
PUBLISHED_SEED = 980406  # the seed of DeepSpec's evaluation, for numbers to be set beside its own


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(problem)


def check_file(name: str, path: Path | None) -> None:
    """Refuse an output file that could not be written once everything is measured."""
    if path is not None:
        require(not path.is_dir(), f"{name} {path}: expected a file; this is a folder")
        check_folder(name, path.parent)


def check_folder(name: str, path: Path) -> None:
    existing = next(p for p in (path, *path.parents) if p.exists())
    require(existing.is_dir(), f"{name}: {existing} is a file; a folder is needed there")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of any call. target: "nano" or a checkpoint folder. quiet: print nothing."""

    target: str | Path = "nano"
    n_prompts: int | None
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int = PUBLISHED_SEED
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    quiet: bool = False

    def check(self) -> None:
        """Raises UserError naming the option that is wrong."""
        require(
            self.max_new_tokens >= 2,
            f"--max-new-tokens: expected 2 or more, the first token is not decoded by a round; "
            f"got {self.max_new_tokens}",
        )
        require(
            self.n_prompts is None or self.n_prompts >= 1,
            f"--n-prompts: expected 1 or more; got {self.n_prompts}",
        )
        require(
            self.threads is None or self.threads >= 1,
            f"--threads: expected 1 or more; got {self.threads}",
        )
        cores = os.cpu_count() or 1
        require(
            self.threads is None or self.threads <= cores,
            f"--threads: expected at most {cores}, the cores of this machine; got {self.threads}",
        )
        check_seed("--seed", self.seed)
        require(
            self.dtype in DTYPES,
            f"--dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}",
        )
        check_device_name(self.device, "--device")


@dataclass(frozen=True, kw_only=True)
class Asked(Decoding):
    """Options of one call with a drafter.

    draft: its folder. cost_model: file of step times; None: `cost_model.json` beside the drafter,
    if there is one. profile: measure step times first, write them there and use them.
    """

    draft: str | Path
    cost_model: Path | None = None
    profile: bool = False

    def check(self) -> None:
        """Raises UserError naming the option that is wrong."""
        require(bool(str(self.draft)), "--draft: expected the folder of a drafter; got nothing")
        super().check()
        if self.profile:
            check_file("--cost-model", self.cost_model)


@dataclass(frozen=True, kw_only=True)
class AtTemperatures(Asked):
    """temperature: one run for each value."""

    temperature: tuple[float, ...]

    def sampling(self) -> tuple[SamplingParams, ...]:
        """The sampling settings in the order asked for. Raises UserError for an invalid one."""
        require(len(self.temperature) > 0, "--temperature: expected at least one value")
        require(
            len(set(self.temperature)) == len(self.temperature),
            f"--temperature: each value once; got {', '.join(map(str, self.temperature))}",
        )
        return tuple(
            SamplingParams(temperature=value, top_p=self.top_p, top_k=self.top_k)
            for value in self.temperature
        )
