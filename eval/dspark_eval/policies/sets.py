"""Three prompt sets: easy to draft, mixed as instructions are, and half of each extreme.

nano-problems       word problems with a worked solution: low entropy
nano-instructions   all plain instructions
nano-mix            word problems and free writing in turn, where many continuations are good
"""

from __future__ import annotations

from itertools import chain

from dspark.nano.instructions import writing
from dspark_eval.suites import Suite, load_suites

MIX = "nano-mix"
WRITING = {family.name for family in writing.FAMILIES}


def prompt_sets(n_prompts: int, seed: int) -> list[Suite]:
    """At most `n_prompts` of each set, drawn by `seed`."""
    (problems,) = load_suites("nano-problems", n_prompts=n_prompts, seed=seed)
    (everything,) = load_suites("nano-instructions", n_prompts=10**6, seed=seed)
    free = [row for row in everything.rows if row.metadata["family"] in WRITING]
    half = n_prompts // 2
    rows = tuple(chain(*zip(problems.rows[:half], free[:half], strict=False)))
    return [
        problems,
        Suite(everything.name, everything.rows[:n_prompts], everything.available),
        Suite(MIX, rows, 2 * len(free)),
    ]
