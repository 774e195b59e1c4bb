"""What a reader wants first, and last: the figures of all sources in one table, and their origin.

Numbers of different machines, prompts or code are shown beside each other, never merged; where
that makes a comparison doubtful the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent
from dspark_eval.measured_files import short_hash
from dspark_eval.reporting.acceptance import verdict
from dspark_eval.reporting.blocks import Block, Prose, Section, notes, table
from dspark_eval.reporting.frames import speculative
from dspark_eval.reporting.sources import Found
from dspark_eval.reporting.words import name, names

HEADS = (
    "drafter, prompt set, temperature T", "speed-up", "accepted length", "accepted drafts",
    "prompts", "same as plain", "calibration error (perfect)",
)  # fmt: skip
TIMED = ("bench", "frames", "frames by rule", "decoding floor", "comparison", "eval")
Document = Mapping[str, Any]


def headline(found: Sequence[Found]) -> Section | None:
    """One row for each setting that was measured; None where nothing was decoded."""
    errors = {
        (name(item.value["drafter"]), setting["temperature"]): _error(
            setting["average_ece_after"], setting["average_ece_floor"]
        )
        for item in found
        if item.kind.name == "calibration"
        for setting in item.value["settings"]
    }
    rows = _told_apart([(item, row) for item in found for row in _rows(item, errors)])
    if not rows:
        return None
    blocks: list[Block] = [
        Prose(
            "Accepted length: tokens per round, the target's own included. Speed-up: against plain "
            "decoding of the same target in the same process. Same as plain: greedy texts equal to "
            "plain decoding's, or tokens that the target confirmed when it read them again. "
            "Calibration error: of the predicted survival, on the set itself where eval measured "
            "it, else after calibrate's fit; behind it what chance alone shows on as many rounds. "
            "Square brackets: 95 % over prompts."
        ),
        table("Everything that was decoded", HEADS, rows),
        *notes(_doubts(found)),
    ]
    return Section("Headline", tuple(blocks))


def subject(found: Sequence[Found]) -> str:
    """One line on what a report is about: drafters, targets, machines, days."""
    drafters, targets, machines, days = (dict[str, None](), dict[str, None](), dict[str, None](),
                                         set[str]())  # fmt: skip
    for item in found:
        facts = environment(item)
        value = item.value if isinstance(item.value, Mapping) else {}
        named = [entry["name"] for entry in value.get("contenders", ())]
        named += [value["drafter"]] if value.get("drafter") else []
        drafters |= dict.fromkeys(map(name, named))
        targets |= dict.fromkeys([name(value["target"])] if value.get("target") else ())
        if facts:
            machines[str(facts["device_name"])] = None
            days.add(facts["date"][:10])
    parts = (
        f"{', '.join(drafters)} for {', '.join(targets)}" if drafters else ", ".join(targets),
        ", ".join(machines),
        " to ".join(sorted({min(days), max(days)})) if days else "",
    )
    return "; ".join(filter(None, parts))


def _told_apart(rows: Sequence[tuple[Found, Sequence[str]]]) -> list[Sequence[str]]:
    """Rows that would begin alike say in what their settings differ, or else their file."""
    alike: dict[str, list[Mapping[str, str]]] = {}
    for item, row in rows:
        alike.setdefault(row[0], []).append(_settings(item))
    shown: list[Sequence[str]] = []
    for item, (first, *others) in rows:
        group, own = alike[first], _settings(item)
        differ = [
            text for key, text in own.items() if any(one.get(key, text) != text for one in group)
        ]
        if len(group) > 1 and group.count(own) > 1:
            differ.append(str(item.path))
        shown.append(("\n".join([first, *([", ".join(differ)] if differ else [])]), *others))
    return shown


def _settings(item: Found) -> Mapping[str, str]:
    """What accepted length must be read together with, in words; what is not told is left out."""
    value = item.value
    run: Document = value.get("runs", [value])[0] if item.kind.name == "bench" else value
    if item.kind.name == "eval":
        run = {**next(iter(value["suites"].values())), **value}
    run = {**run.get("extra", {}), **run}
    length, most, policy = (run.get(k) for k in ("draft_length", "max_new_tokens", "policy"))
    protocol = run.get("protocol") if item.kind.name == "eval" else None
    told = {"kind": item.kind.name}
    if length is not None:
        told["length"] = f"draft length {length}"
    if isinstance(policy, str):
        told["policy"] = f"policy {policy}"
    if "verification" in run:
        told["verification"] = f"{run['verification']} verification"
    if most is not None:
        told["most"] = f"at most {counted(most, 'new token')}"
    if item.kind.name == "eval":
        told["protocol"] = f"protocol {protocol['name']}" if protocol else "no protocol"
    if run.get("seed") is not None:
        told["seed"] = f"seed {run['seed']}"
    return told


def _rows(item: Found, errors: Mapping[tuple[str, float], str]) -> Iterator[Sequence[str]]:
    value = item.value
    if item.kind.name == "bench":
        for run in value.get("runs", [value]):
            same = verdict(run["extra"].get("lossless"))
            if run["greedy_mismatches"] is not None:
                equal = run["n_prompts"] - run["greedy_mismatches"]
                same = f"{equal} of {run['n_prompts']} texts"
            yield _row(value, run["extra"]["prompts"], run, run["temperature"], same, errors)
    elif item.kind.name in ("eval", "frames"):
        for prompts, suite in value["suites"].items():
            same = verdict(suite.get("lossless"))
            if suite.get("texts_equal") is not None:
                same = f"{suite['texts_equal']} of {suite['n_prompts']} texts"
            yield _row(value, prompts, suite, value["temperature"], same, errors)
    elif item.kind.name == "frames by rule":
        for prompts, temperature, figures, same in speculative(value):
            yield _row(value, prompts, figures, temperature, same, errors)
    elif item.kind.name == "comparison":
        for prompts, suite in value["suites"].items():
            short = names([entry["name"] for entry in suite["contenders"]])
            yield from (
                _compared(value, prompts, suite, entry, short[entry["name"]])
                for entry in suite["contenders"]
                if entry["speedup"] is not None
            )


def _row(
    value: Document,
    prompts: str,
    figures: Document,
    temperature: float,
    same: str,
    errors: Mapping[tuple[str, float], str],
) -> Sequence[str]:
    drafter = name(value.get("drafter") or value["target"])
    speedup = figures["speedup"]
    own = figures.get("confidence")
    error = errors.get((drafter, temperature), NOT_MEASURED)
    if own and own["average_ece"] is not None:
        error = _error(own["average_ece"], own["average_ece_floor"])
    return (
        f"{drafter}\n{prompts}, T = {temperature:g}",
        NOT_MEASURED if speedup is None
        else f"{speedup:.2f}x {interval(figures['speedup_ci95'])}".strip(),
        f"{number(figures['accepted_length'], 2)} {interval(figures['accepted_length_ci95'])}",
        percent(figures.get("acceptance_rate")),
        str(figures["n_prompts"]),
        same,
        error,
    )  # fmt: skip


def _error(measured: float | None, floor: float | None) -> str:
    """A calibration error means something beside its floor alone: few rounds show a large one."""
    return NOT_MEASURED if measured is None else f"{percent(measured)} ({percent(floor)})"


def _compared(
    value: Document, prompts: str, suite: Document, entry: Document, who: str
) -> Sequence[str]:
    speed, length, n = entry["speedup"], entry["accepted_length"], suite["n_prompts"]
    wrong = entry["greedy_mismatches"]
    return (
        f"{who}\n{prompts}, T = {value['temperature']:g}",
        f"{number(speed['ratio'], 2)}x {interval(speed['ratio_ci95'])}",
        f"{number(length['value'], 2)} {interval(length['ci95'])}",
        percent(entry["acceptance_rate"]["value"]),
        str(n),
        NOT_MEASURED if wrong is None else f"{n - wrong} of {n} texts",
        NOT_MEASURED,
    )


def _doubts(found: Sequence[Found]) -> Iterator[str]:
    """What keeps two rows of the table from being compared."""
    timed = [item for item in found if item.kind.name in TIMED and item.kind.name != "eval"]
    machines = {_machine(environment(item)) for item in timed}
    if len(machines) > 1:
        yield (
            "speeds come from different machines or settings: compare speed-ups and accepted "
            f"lengths, not seconds ({'; '.join(sorted(machines))})"
        )
    busy = list(_busy(found))
    if busy:
        yield f"measured on a busy machine, seconds are not to be relied on: {', '.join(busy)}"
    for prompts, drawn in _draws(found).items():
        if len(drawn) > 1:
            yield (
                f"{prompts}: {len(drawn)} different draws of prompts; accepted lengths on it "
                "differ by the prompts too"
            )


def _busy(found: Sequence[Found]) -> Iterator[str]:
    """Sources during which more ran than the machine has cores."""
    for item in found:
        facts = environment(item) if item.kind.name in TIMED else {}
        load, cores = facts.get("load_average_1m"), facts.get("cpu_cores")
        if load and cores and load > cores:
            yield f"`{item.path}` (load {load:g} on {counted(cores, 'core')})"


def _machine(facts: Document) -> str:
    return f"{facts['device_name']}, threads {facts['threads']}, {facts['dtype']}"


def _draws(found: Sequence[Found]) -> dict[str, set[str]]:
    """Prompt set -> hashes of the prompts that were drawn from it."""
    drawn: dict[str, set[str]] = {}
    for item in found:
        if item.kind.name == "bench":
            extra = item.value["extra"]
            drawn.setdefault(extra["prompts"], set()).add(extra["prompts_sha256"])
        elif item.kind.name in ("eval", "comparison"):
            for prompts, suite in item.value["suites"].items():
                drawn.setdefault(prompts, set()).add(suite["prompts_sha256"])
    return drawn


# ------------------------------------------------------------------ origin


def environment(item: Found) -> Document:
    """Machine, versions and revision of a source; empty where it did not record them."""
    value = item.value
    if item.kind.name == "eval":
        return next(iter(value["suites"].values()))["environment"]
    return value.get("environment") or {} if isinstance(value, Mapping) else {}


def origin(found: Sequence[Found]) -> Section:
    """Where each number comes from, and what it would take to get it again."""
    revisions = {environment(item).get("git_revision") for item in found} - {None}
    blocks: list[Block] = [
        Prose(
            "Every source with the code, the machine and the seed it was measured with. The values "
            "themselves are in `report.json`, from which `dspark report` makes this page again."
        ),
        table(
            "Sources",
            ("file", "kind", "target", "drafter", "schema", "date", "dspark", "revision",
             "machine", "torch", "seed"),
            map(_origin_row, found),
            texts=11,
        ),
        *notes([f"measured at {len(revisions)} revisions of the code"] * (len(revisions) > 1)),
    ]  # fmt: skip
    return Section("Where the numbers come from", tuple(blocks))


def _origin_row(item: Found) -> Sequence[str]:
    value = item.value if isinstance(item.value, Mapping) else {}
    facts = environment(item)
    settings = value.get("settings") if item.kind.name == "training" else None
    seed = (settings or {}).get("train", {}).get("seed", value.get("seed"))
    seed = value.get("extra", {}).get("seed", seed) if item.kind.name == "bench" else seed
    if "seeds" in value:
        seed = ", ".join(map(str, value["seeds"]))
    return (
        f"`{item.path}`",
        item.kind.name,
        _text(value.get("target") or (settings or {}).get("target", {}).get("name")),
        _text(value.get("drafter")) + short_hash((value.get("identity") or {}).get("drafter")),
        _text(value.get("schema_version")),
        _text(facts.get("date"))[:16].replace("T", " "),
        _text(facts.get("dspark")),
        _text(facts.get("git_revision")),
        _machine(facts) if facts else NOT_MEASURED,
        _text(facts.get("torch")),
        _text(seed),
    )


def _text(value: Any) -> str:
    return NOT_MEASURED if value is None else str(value)
