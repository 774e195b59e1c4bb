"""`dspark eval --compare`: the options of `dspark eval` that several contenders can share."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import typer

from dspark.commands.options import end_with_verdict, print_json
from dspark.errors import UserError

OF_ONE = (
    "draft", "policy", "bands", "high", "low", "siblings", "relaxed", "cost_model", "profile",
    "turns", "plain", "check", "run_code", "concurrency", "rounds",
)  # fmt: skip
"""Options that mean something for one drafter alone."""
SHARED = (
    "n_prompts", "max_new_tokens", "draft_length", "verification", "temperature", "top_p", "top_k",
    "seed",
)  # fmt: skip
"""Settings of all contenders, a protocol's in place of defaults."""
AS_GIVEN = ("target", "threads", "device", "dtype", "out", "suite_dir", "protocol")


def side_by_side(context: typer.Context, settings: Mapping[str, Any]) -> None:
    """Compare what `--compare` names. Raises UserError for an option of one drafter beside it, and
    for one that a protocol has another value of."""
    from dspark_eval.compare import CompareOptions, run_compare
    from dspark_eval.protocols import check_protocol

    given = context.params
    for name in OF_ONE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag}: means something for one drafter alone; leave it or --compare out"
            )
    check_protocol(given["protocol"], SimpleNamespace(**settings))
    options = CompareOptions(
        contenders=tuple(given["compare"]),
        suites=tuple(given["suite"]),
        quiet=given["as_json"],
        command=context.obj,
        **{name: settings[name] for name in SHARED},
        **{name: given[name] for name in AS_GIVEN},
    )
    document = run_compare(options)
    if given["as_json"]:
        print_json(document)
    end_with_verdict(document)
