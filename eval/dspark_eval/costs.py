"""Where a run's cost model comes from: measured now, a file, or none.

--profile                  measured, and written to --cost-model or beside the drafter
--cost-model F             read
neither                    DRAFT/cost_model.json if there is one, of recorded frames
                           DRAFT/frame_costs.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.runtime.cost_model import (
    COST_MODEL_FILE,
    FRAME_COSTS_FILE,
    CostModel,
    load_cost_model,
)
from dspark_eval import step_times
from dspark_eval.environment import describe_environment
from dspark_eval.pair import Pair
from dspark_eval.recorded import Recorder
from dspark_eval.report import progress


@dataclass(frozen=True, eq=False)
class Costs:
    """A cost model, where it lies, and what makes it doubtful here."""

    model: CostModel
    path: Path
    warnings: tuple[str, ...] = ()


def find_costs(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    draft: str | Path,
    cost_model: Path | None,
    profile: bool,
    batches: Sequence[int] = (1,),
    recorder: Recorder | None = None,
    quiet: bool = False,
) -> Costs | None:
    """Measure or read; of the frames of a `recorder` those. None: not asked for and not there.

    Raises UserError for a file that is missing, wrong or cannot be written.
    """
    own = COST_MODEL_FILE if recorder is None else FRAME_COSTS_FILE
    path = cost_model or Path(draft) / own
    if profile:
        model = _measure(pair, prompts, batches, recorder, quiet)
        try:
            atomic_write_json(path, model.to_dict())
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        return Costs(model, path)
    if cost_model is None and not path.is_file():
        return None
    model = load_cost_model(path)
    return Costs(model, path, tuple(_doubts(model, path, pair, recorder)))


def _measure(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    recorder: Recorder | None,
    quiet: bool,
) -> CostModel:
    if recorder is not None:
        with progress("frame times", recorder.timings, quiet) as advance:
            return recorder.costs(prompts, advance)
    repeats = step_times.REPEATS
    total = step_times.total_repeats(batches, repeats)
    with progress("step times", total, quiet) as advance:
        return step_times.profile_pair(
            pair, prompts, batches=batches, repeats=repeats, advance=advance
        )


def _doubts(model: CostModel, path: Path, pair: Pair, recorder: Recorder | None) -> list[str]:
    """Why the times in a file may not be those of this run."""
    found = []
    if (recorder is not None) != ("frames" in model.environment):
        found.append("of recorded frames" if recorder is None else "pass by pass, not of frames")
    seats = [costs.batch for costs in model.batches]
    if recorder is not None and recorder.seats not in seats:
        found.append(f"with a batch of {' or '.join(map(str, seats))}")
    if not step_times.same_machine(
        model, describe_environment(pair.target.device, pair.target.dtype)
    ):
        found.append("on another machine, device, dtype or number of threads")
    if Path(model.target).name != Path(pair.target.name).name:
        found.append(f"with target {model.target}")
    beside = path.parent.resolve() == Path(pair.drafter_name).resolve()
    if not beside and Path(model.drafter).name != Path(pair.drafter_name).name:
        found.append(f"with drafter {model.drafter}")
    return (
        [f"{path}: measured {' and '.join(found)}; measure again with --profile"] if found else []
    )
