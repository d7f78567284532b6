"""`elastic-ckpt audit RUN`: proves that a run trained on the right examples.

It compares them with those that one host reads from the run's own pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from typing import TYPE_CHECKING, Any

from elastic_ckpt.application import run_directory
from elastic_ckpt.config import keys, load, schema

if TYPE_CHECKING:
    from elastic_ckpt.training import audit

_WHY_UNPROMISED = " (grain_use_elastic_iterator promises none)"
_LIMITS = (
    "An audit compares with the run's own pipeline, read anew by one host: what this\n"
    "leaves out by itself (filters, truncation, incomplete batches) is outside it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Audits the run; 1 if it fails."""
    outcome = outcome_of(arguments.run)
    if arguments.json:
        content = dataclasses.asdict(outcome) | {"passed": outcome.passed}
        print(json.dumps(content, indent=2))
    else:
        print(describe(outcome))
    return 0 if outcome.passed else 1


def outcome_of(directory: str) -> audit.Audit:
    """Audits the run in `directory`.

    Raises:
      RunError: if there is no run.
      DataError: if it has trained nothing, or its data cannot be read.
    """
    from elastic_ckpt.checkpoint import run_saver, summary
    from elastic_ckpt.data import elastic_data, pipeline, positional
    from elastic_ckpt.training import audit, step_log

    config = run_directory.read_config(directory)
    attempts = step_log.read(directory)
    saved = summary.steps(os.path.join(directory, run_saver.DIRECTORY))
    logged = {attempt.attempt: attempt.data for attempt in attempts}

    @functools.cache
    def section(attempt: int) -> schema.DataSection:
        values: dict[str, Any] = {**keys.values(config), **logged[attempt]}
        return load.from_values(values, place=f"the log of attempt {attempt}").data

    def data_of(attempt: int) -> elastic_data.ElasticData:
        return pipeline.from_config(section(attempt))

    last, start_step = data_of(attempts[-1].attempt), attempts[0].start_step
    return audit.audit(
        attempts,
        data_of,
        is_in_order=lambda attempt: not section(attempt).grain_use_elastic_iterator,
        num_records=last.num_records()
        if isinstance(last, positional.PositionalData)
        else None,
        num_saved_steps=max(saved, default=0),
        missing_checkpoint=_missing_checkpoint(
            config,
            finished=run_directory.is_finished(directory),
            num_steps=start_step + len(step_log.lineage(attempts)),
            start_step=start_step,
            saved=max(saved, default=0),
        ),
    )


def describe(outcome: audit.Audit) -> str:
    """The outcome in words."""
    hosts = " -> ".join(map(str, outcome.hosts))
    most = "" if outcome.is_count_exact else "at most "
    lines = [
        f"{outcome.num_steps} steps took {outcome.num_examples:,} rows"
        + (f", {outcome.num_epochs:.2f} epochs" if outcome.num_epochs else "")
        + f"; hosts: {hosts}",
        f"lost: {most}{outcome.num_lost} examples; repeated: {most}"
        f"{outcome.num_repeated}",
        f"batches of the one-host run: {outcome.num_batch_identical_steps} of"
        f" {outcome.num_steps}, of which {outcome.num_row_identical_steps} have its"
        f" order of rows, promised for {outcome.num_row_promised_steps}"
        + _WHY_UNPROMISED
        * (outcome.num_row_promised_steps < outcome.num_steps),
    ]
    if outcome.num_redone_steps:
        lines.append(
            f"steps trained again after an interruption: {outcome.num_redone_steps}"
        )
    if outcome.num_left_out:
        lines.append(
            f"rows left out where the run went back to an older step:"
            f" {outcome.num_left_out:,}"
        )
    if outcome.passed:
        lines += [
            "PASSED: every step used the examples and tokens of the one-host run's"
            " batch, and none was lost or repeated",
            _LIMITS,
        ]
    else:
        problem = outcome.first_difference or outcome.missing_checkpoint
        lines.append(f"FAILED: {problem}")
    return "\n".join(lines)


def _missing_checkpoint(config: schema.Config, **progress: Any) -> str:
    from elastic_ckpt.training import audit

    section, tiers = config.checkpoint, config.tiers
    if not section.enable_checkpointing:
        return ""
    period: int | None = section.checkpoint_period
    if tiers.enable_multi_tier_checkpointing:
        period = tiers.multi_tier_checkpointing_backup_interval_steps or None
    return audit.missing_checkpoint(
        period=period, at_end=section.save_checkpoint_on_completion, **progress
    )
