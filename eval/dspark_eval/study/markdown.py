"""The table of a study as Markdown, every number under its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.wording import counted


def markdown(document: dict[str, Any]) -> str:
    """The table as Markdown, with its protocol above it."""
    first = document["rows"][0]["results"]
    heads = [measurement_name(result) for result in first]
    seeds = len(document["seeds"])
    lines = [
        f"# {document['question']}",
        "",
        f"{_duration(document)} on the same rows, {seeds} seed(s), draft length "
        f"{document['draft_length']}, {document['prompts']} held-out prompts of each set decoded "
        "for real. Accepted length: mean over seeds (lowest to highest), pooled over prompts, the "
        "bonus token included; forced: the same under teacher forcing on held-out rows. Ratio: "
        f"against `{document['reference']}` on {heads[0]}, 95 % paired bootstrap over prompts, of "
        "the seeds that both have; how far seeds move an arm is in its spread. Conditional "
        f"acceptance at positions 1 to {document['draft_length']} is of {heads[0]}.",
        "",
        "| arm | parameters | steps | seconds | "
        + " | ".join(heads)
        + " | forced | ratio [95 %] | conditional acceptance |",
        "|---|---|---|---|" + "---|" * len(heads) + "---|---|---|",
    ]
    lines += [_markdown_row(row, row["arm"] == document["reference"]) for row in document["rows"]]
    notes = [f"{row['arm']}: {row['note']}" for row in document["rows"] if row["note"]]
    if notes:
        lines += ["", "; ".join(notes) + "."]
    if document["missing"]:
        lines += ["", f"Not measured yet: {', '.join(document['missing'])}."]
    lines += _long_table(document["rows"]) + _drafting_table(document["rows"])
    return "\n".join(lines) + "\n"


def measurement_name(result: dict[str, Any]) -> str:
    """Prompt set and temperature, in short."""
    return f"{result['suite'].removeprefix('nano-')}, T = {result['temperature']:g}"


def _duration(document: dict[str, Any]) -> str:
    if document["equal_seconds"]:
        return (
            f"As many seconds as {counted(document['steps'], 'step')} of "
            f"`{document['reference']}` take,"
        )
    return counted(document["steps"], "step")


def _markdown_row(row: dict[str, Any], is_reference: bool) -> str:
    cells = [row["arm"], f"{row['parameters'] / 1e6:.3f} M", f"{row['steps']}"]
    cells.append(f"{row['train_s']:.0f}")
    for result in row["results"]:
        each = result["accepted_length_per_seed"]
        spread = f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else ""
        cells.append(f"{result['accepted_length']:.3f}{spread}")
    cells.append(f"{row['teacher_forced_accepted_length']:.2f}")
    ratio = row["results"][0]["ratio"]
    cells.append(_ratio_text(ratio) if ratio else "1" if is_reference else "-")
    rates = row["results"][0]["conditional_acceptance"]
    cells.append(" ".join("-" if rate is None else f"{rate:.2f}" for rate in rates))
    return "| " + " | ".join(cells) + " |"


def _ratio_text(ratio: dict[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['value']:.3f}"
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _long_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Accepted length by context, where it was measured."""
    measured = [row for row in rows if row["long"]]
    if not measured:
        return []
    first = measured[0]["long"]
    heads = [
        f"{entry['context']} {short_count(entry['tokens'])}" if entry["tokens"] else "none"
        for entry in first
    ]
    exact = " | ".join(f"{100 * entry['exact_answers']:.0f} %" for entry in first)
    lines = [
        "",
        f"Accepted length by context, greedy, {first[0]['prompts']} problems each, the same ones "
        "everywhere, mean over seeds: after nothing, after earlier turns of a chat, and after as "
        "many repeats of the first token. The first row says how many answers of the target "
        "itself are right there: where they are not, the text is one that it makes no sense of.",
        "",
        "| arm | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        f"| exact answers of the target | {exact} |",
    ]
    for row in measured:
        cells = [f"{entry['accepted_length']:.2f}" for entry in row["long"]]
        lines.append("| " + " | ".join([row["arm"], *cells]) + " |")
    return lines


def _drafting_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Cost of one draft by context, where it was measured."""
    timed = [row for row in rows if row["drafting"]]
    if not timed:
        return []
    contexts = [entry["context"] for entry in timed[0]["drafting"]]
    lines = [
        "",
        "One draft, float32, one CPU thread: milliseconds (median), and MB read (weights, markov "
        "map, LM head, context) after a context of as many tokens.",
        "",
        "| arm | " + " | ".join(f"{short_count(c)}: ms" for c in contexts)
        + " | " + " | ".join(f"{short_count(c)}: MB" for c in contexts) + " |",
        "|---|" + "---|" * (2 * len(contexts)),
    ]  # fmt: skip
    for row in timed:
        times = [f"{entry['draft_ms']:.2f}" for entry in row["drafting"]]
        reads = [
            f"{(entry['weight_bytes'] + entry['context_bytes']) / 1e6:.2f}"
            for entry in row["drafting"]
        ]
        lines.append("| " + " | ".join([row["arm"], *times, *reads]) + " |")
    return lines


def short_count(tokens: int) -> str:
    """4096 as 4k; numbers that are no multiple of 1024 in full."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)
