"""`dspark import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, print_json

if TYPE_CHECKING:
    from dspark.interop.importing import Imported


@app.command(
    "import",
    epilog="Example: `dspark import Kimi-K3-DSpark --out k3-draft --tap-kind attn_res_mixture`",
)
def import_(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist yet.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="deepspec|speculators|sglang|vllm|modelopt|k3-mla; without it, what config.json "
            "claims.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Target it drafts for (`nano` or a folder): sizes are checked and copies of its "
            "tables compared."
        ),
    ] = None,
    tap_kind: Annotated[
        str | None,
        typer.Option(help="What a tap holds: residual|attn_res_mixture|raw_prefix."),
    ] = None,
    slot_layout: Annotated[
        str | None,
        typer.Option(help="anchor: slot 0 predicts, or mask: only the mask slots do."),
    ] = None,
    block_causal: Annotated[
        str | None,
        typer.Option(help="Layers whose slots only see earlier slots: none|sliding|all."),
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Id that fills a block after the anchor.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Proposals per round, as trained.")] = None,
    target_layers: Annotated[int | None, typer.Option(help="Layers of the target.")] = None,
    rope: Annotated[
        str | None,
        typer.Option(help="Rotary positions: THETA, or THETA,FACTOR,ORIGINAL for YaRN."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Read a drafter of another tool. Options state what its file leaves open, and only that."""
    from dspark.commands.exchange import parse_rope, target_at_hand
    from dspark.interop.importing import import_drafter, require_new
    from dspark.interop.spec import Given, check_given

    require_new(out)
    facts, copies = target_at_hand(target)
    given = Given(
        tap_kind=tap_kind,
        slot_layout=slot_layout,
        block_causal=block_causal,
        mask_token_id=mask_token_id,
        block_size=block_size,
        num_target_layers=target_layers,
        rope=parse_rope(rope),
        target=facts,
    )
    check_given(given)
    done = import_drafter(source, out, layout=layout, given=given, target_copies=copies)
    if as_json:
        print_json(_to_dict(done))
    else:
        _report(source, out, done)


def _report(source: Path, out: Path, done: Imported) -> None:
    from dspark.commands.exchange import describe, print_fields

    fields = [("format", done.format.title)]
    if done.recognised:
        fields.append(("recognised", done.recognised))
    fields += describe(done.config)
    fields += [("decided", reason) for reason in done.decided]
    if done.dropped:
        how = "compared with the target's" if done.compared else "not compared: no --target"
        fields.append(("left out", f"{', '.join(done.dropped)} ({how})"))
    if done.unknown:
        fields.append(("not known", f"{', '.join(done.unknown)} (kept in interop.json)"))
    print_fields(f"{source} -> {out}", fields)


def _to_dict(done: Imported) -> dict[str, object]:
    config = done.config
    return {
        "format": done.format.name,
        "recognised": done.recognised,
        "backbone": config.backbone,
        "target_tap_kind": config.target_tap_kind,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.sample_from_anchor,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "decided": list(done.decided),
        "dropped_tensors": list(done.dropped),
        "copies_compared": done.compared,
        "unknown_keys": list(done.unknown),
    }
