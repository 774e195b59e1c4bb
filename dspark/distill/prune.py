"""`dspark prune`: a trained drafter cut to a budget, then distilled again on the same prompts.

    measure -> score units and price axes (effects.py) -> best size within the budget (budget.py)
            -> cut (draft/pruning) -> measure -> distil from there (run.py) -> measure
    OUT/prune.json  pruned/         what was decided and measured, and the drafter as it was cut
    OUT/...                         an ordinary run folder, which holds the recovered drafter

With no steps to recover, the cut drafter itself is what OUT holds. A pruning that was interrupted
goes on with `resume`: what is cut stays cut, and recovery continues from its last checkpoint.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from dspark.distill.answers import (
    RunRows,
    answer_prompts,
    choose_prompts,
    folder_digest,
    hold_out,
    response_settings,
)
from dspark.distill.batches import make_batch
from dspark.distill.budget import Budget, Pricing, check_reachable, fit
from dspark.distill.config import load_config
from dspark.distill.effects import Bench, as_document, price, scores
from dspark.distill.fingerprint import check_stored_tokenizer
from dspark.distill.lock import locked
from dspark.distill.processes import Processes
from dspark.distill.prompts import read_prompts
from dspark.distill.prune_options import PruneOptions, base_config, check_folder, flat
from dspark.distill.prune_report import history_entry, lengths_of
from dspark.distill.pruned_folder import (
    PRUNED,
    REPORT,
    drafter_overrides,
    finish_folder,
    note_pruning,
    read_prunings,
    save_pruned,
)
from dspark.distill.run import ROWS, RUN_FILE, evaluation, prompt_files, run_distill
from dspark.distill.taps import FeatureSource, KeptFeatures
from dspark.distill.trainer import Trainer
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.cost import parameters
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.cutting import cut_to
from dspark.draft.pruning.sizes import Grid, Size, resized
from dspark.draft.vocabulary import coverage, most_frequent, reduce_vocabulary, token_frequency
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.wording import counted


def run_prune(
    options: PruneOptions, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Prune and recover; returns what was measured, which is OUT/prune.json.

    Raises UserError for wrong input, a budget below the smallest drafter, or a folder that holds
    something else; KeyboardInterrupt with everything so far kept for `resume`.
    """
    console = console or Console(stderr=True)
    out = options.out
    with locked(out, "wait for it to end, or choose another --out"):
        check_folder(options, resume)
        if (out / PRUNED / "config.json").is_file():
            report = read_json(out / REPORT)
        else:
            report = _begin(options, console)
    if options.steps:
        config = load_config(None, flat(report["recovery"]))
        run_distill(config, resume=(out / RUN_FILE).is_file(), console=console)
        report["recovered"] = report["pruned"] | lengths_of(read_json(out / "training.json")[-1])
        note_pruning(out, report)
    else:
        finish_folder(out)
    atomic_write_json(out / REPORT, report)
    return report


def _begin(options: PruneOptions, console: Console) -> dict[str, Any]:
    """Cut; from the first moment on the folder says what it is for, unless that is refused."""
    path = options.out / REPORT
    atomic_write_json(path, {"options": options.document()})
    try:
        return _Pruning(options, console).run()
    except UserError:
        path.unlink()
        raise


class _Pruning:
    """Everything up to the cut drafter on disk."""

    def __init__(self, options: PruneOptions, console: Console) -> None:
        self.options, self.console = options, console
        self.config = base_config(options, read_config(options.draft))
        self.processes = Processes.start(self.config.target.device)
        if self.processes.world > 1:
            raise UserError("dspark prune runs in one process; recover with `dspark distill` then")
        self.loaded: LoadedTarget = load_target(
            self.config.target.name,
            dtype=getattr(torch, self.config.target.dtype),
            device=self.processes.device,
        )
        self.drafter = load_drafter(options.draft, self.loaded.target, device=self.processes.device)
        check_stored_tokenizer(options.draft, self.loaded.tokenizer)
        self.rows = self._rows()
        self.source: FeatureSource = KeptFeatures(
            self.loaded.target, self.drafter.taps, int(self.config.train.keep_gib * 2**30)
        )

    def run(self) -> dict[str, Any]:
        """Decide, cut, measure, save; returns the report so far."""
        options = self.options
        report: dict[str, Any] = {"schema_version": 1, "options": options.document()}
        drafter = self.drafter
        if options.vocab is not None:
            drafter, report["vocabulary"] = self._reduce_vocabulary(options.vocab)
        budget = None if options.budget is None else Budget.parse(options.budget)
        if budget is not None:
            check_reachable(budget, drafter.config, self._pricing())
        self._tell("measuring the drafter as it is")
        report["before"] = self._measure(self.drafter)
        if budget is not None:
            drafter, decided = self._cut(drafter, budget)
            report |= decided
        report["pruned"] = self._measure(drafter)
        report["recovered"] = None
        config = load_config(None, flat(self.config.to_dict()) | self._recovery(drafter))
        report["recovery"] = config.to_dict()
        history = [*read_prunings(options.draft), history_entry(report, Size.of(drafter.config))]
        report["prunings"] = history
        atomic_write_json(options.out / REPORT, report)
        save_pruned(options.out / PRUNED, options.draft, drafter, report)
        return report

    def _rows(self) -> RunRows:
        """The rows of the drafter's own run, answered again only where they are not at hand."""
        config, out = self.config, self.options.out
        own = self.options.draft / ROWS
        if own.is_dir() and not (out / ROWS).exists() and self._same_data():
            shutil.copytree(own, out / ROWS)
        prompts = read_prompts(prompt_files(config), strict=config.data.strict)
        answered = answer_prompts(
            out / ROWS,
            self.loaded.target,
            self.loaded.tokenizer,
            choose_prompts(prompts.rows, config.data.max_prompts),
            response_settings(config.data, config.data_seed),
            greedy=config.data.greedy,
            target_digest=folder_digest(self.loaded.path),
            processes=self.processes,
            console=self.console,
        )
        return hold_out(answered, config.data.held_out, config.data_seed)

    def _same_data(self) -> bool:
        keys = ("data.", "target.", "train.seed")
        return not any(key.startswith(keys) for key in self.options.settings)

    def _measure(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """Size, cost and accepted lengths."""
        config = self.config
        trainer = Trainer(
            self.loaded.target, drafter, self.rows.training, config.train, self.processes,
            self.source,
        )  # fmt: skip
        record = evaluation(config, self.loaded.target, drafter, self.rows, trainer)()
        pricing = self._pricing()
        return {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "bytes_per_draft_step": pricing.bytes(drafter.config),
            "draft_ms": pricing.milliseconds(drafter.config),
            **lengths_of(record),
        }

    def _pricing(self) -> Pricing:
        dtype = getattr(torch, self.config.target.dtype)
        return Pricing(self.loaded.target, dtype, self.options.context)

    def _reduce_vocabulary(self, size: int) -> tuple[DSparkDrafter, dict[str, Any]]:
        drafter, target = self.drafter, self.loaded.target
        own = drafter.draft_ids
        ends = [i for i in target.end_token_ids if own is None or i in set(own.tolist())]
        most = min(drafter.config.draft_vocab, target.vocab_size)
        if not max(1, len(ends)) <= size <= most:
            raise UserError(
                f"--vocab {size}: expected {max(1, len(ends))}..{most}, what is proposed now"
            )
        counts = token_frequency(self.rows.training, drafter.config.vocab_size)
        if own is not None:  # ids that it cannot propose are no candidates
            outside = torch.ones_like(counts, dtype=torch.bool)
            outside[own.cpu()] = False
            counts[outside] = -1
        ids = most_frequent(counts, size, always=ends)
        found = coverage(self.rows.held_out, ids, drafter.config.block_size)
        text = "" if found.share is None else f": {100 * found.share:.2f} % of held-out tokens"
        if found.accepted_length is not None:
            text += f", so at most {found.accepted_length:.2f} tokens a round"
        self._tell(f"draft vocabulary of {size} ids{text}")
        described = {
            "size": size,
            "coverage": found.share,
            "accepted_length_ceiling": found.accepted_length,
        }
        return reduce_vocabulary(drafter, ids), described

    def _cut(self, drafter: DSparkDrafter, budget: Budget) -> tuple[DSparkDrafter, dict[str, Any]]:
        options, train = self.options, self.config.train
        training = self.rows.training
        chosen = range(0, len(training), max(1, len(training) // options.rows))[: options.rows]
        batches = [
            make_batch(
                training, chosen[at : at + train.micro_rows], anchors=train.anchors,
                seed=train.seed, epoch=-2,
            ).to(self.processes.device)
            for at in range(0, len(chosen), train.micro_rows)
        ]  # fmt: skip
        plain = replace(train, anchor_choice="uniform", confidence=0.0)  # what tokens cost
        bench = Bench(self.loaded.target, batches, plain, self.source)
        scored = scores(bench, drafter, options.importance)
        prices = price(bench, drafter, scored, self._tell)
        grid = Grid.of(drafter.config, prices.order)
        choice = fit(budget, grid, prices.lists, self._pricing())
        predicted = parameters(resized(drafter.config, choice.size))
        self._tell(
            f"cutting to {counted(len(choice.size.layers), 'layer')}, "
            f"{counted(choice.size.heads, 'head')}, MLP width {choice.size.mlp}, markov rank "
            f"{choice.size.rank}: {predicted:,} parameters"
        )
        try:
            cut = cut_to(drafter, choice.size, scored)
        except ValueError as error:
            raise UserError(f"{options.draft}: {error}") from None
        found = sum(p.numel() for p in cut.parameters())
        if found != predicted:
            raise UserError(f"{options.draft}: {found} parameters left, {predicted} predicted")
        decided = {
            "limit": str(budget),
            "cost": choice.cost,
            "expected_loss_added": choice.expected,
            "effects": as_document(prices, scored),
        }
        return cut, decided

    def _recovery(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """Settings of the recovery run that follow from the drafter and its rows."""
        options = self.options
        per_epoch = math.ceil(len(self.rows.training) / self.config.train.rows_per_step)
        return {
            **drafter_overrides(drafter.config),
            "drafter.init_from": str(options.out / PRUNED),
            "train.epochs": max(1, math.ceil(options.steps / per_epoch)),
            "train.max_steps": max(1, options.steps),
            "out.dir": str(options.out),
        }

    def _tell(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
