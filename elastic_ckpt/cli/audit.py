"""`elastic-ckpt audit RUN`: proves that a run trained on the right examples.

It compares them with those that one host reads from the run's own pipeline. With
`--find` and `--step` it tells which documents they were made of (`audit_documents`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import keys, load, run_directory, schema

if TYPE_CHECKING:
    from elastic_ckpt.data import elastic_data
    from elastic_ckpt.training import audit, step_log

_WHY_UNPROMISED = " (grain_use_elastic_iterator promises none)"
_LIMITS = (
    "An audit compares with the run's own pipeline, read anew by one host: what this\n"
    "leaves out by itself (filters, truncation, incomplete batches) is outside it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument(
        "--data",
        metavar="MODULE:NAME",
        help="for a training loop of your own: its data, as ec.batches was given it,"
        " or a function that returns it, in a module that can be imported",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--find",
        metavar="FILE:RECORD",
        help="show which steps used a document: the end of a path, and the number of"
        " the record in the file, from 0",
    )
    question.add_argument(
        "--step",
        type=option_numbers.count,
        metavar="N",
        help="show which documents a step used",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Audits the run, or answers a question about its documents; 1 if it fails."""
    if arguments.find is not None or arguments.step is not None:
        from elastic_ckpt.cli import audit_documents

        run = run_of(arguments.run, data=arguments.data)
        return audit_documents.answer(run, arguments)
    outcome = outcome_of(arguments.run, data=arguments.data)
    if arguments.json:
        content = dataclasses.asdict(outcome) | {"passed": outcome.passed}
        print(json.dumps(content, indent=2))
    else:
        print(describe(outcome))
    return 0 if outcome.passed else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was recorded in a directory.

    Attributes:
      directory: of the run.
      attempts: its step log.
      data_of: returns the data of an attempt, given its number.
      is_in_order: returns whether these data guarantee the order of rows.
      first_step: the number of its first step in outputs; the log has 0.
      own: the user's own loop, if it is one.
      config: its configuration, if it is none.
    """

    directory: str
    attempts: list[step_log.Attempt]
    data_of: Callable[[int], elastic_data.ElasticData]
    is_in_order: Callable[[int], bool]
    first_step: int
    own: run_directory.OwnLoop | None
    config: schema.Config | None


def run_of(directory: str, *, data: str | None = None) -> Run:
    """The run in `directory`; see `outcome_of`."""
    from elastic_ckpt.training import step_log

    own = run_directory.read_loop(directory)
    config = None if own is not None else run_directory.read_config(directory)
    attempts = step_log.read(directory)
    data_of: Callable[[int], elastic_data.ElasticData]
    is_in_order: Callable[[int], bool]
    if config is None:
        data_of = _own_data(directory, data)
        is_in_order = lambda _: True  # noqa: E731
    else:
        if data is not None:
            raise errors.ConfigError(
                f"--data: the data of {directory} is in its configuration; leave"
                " --data out"
            )
        section = _sections(config, attempts)
        data_of = _configured_data(section)
        is_in_order = lambda number: not section(number).grain_use_elastic_iterator  # noqa: E731
    return Run(
        directory=directory,
        attempts=attempts,
        data_of=_dealt_as_saved(directory, data_of),
        is_in_order=is_in_order,
        # `RunDirectory.log` counts the steps that are done.
        first_step=int(own is not None),
        own=own,
        config=config,
    )


def _dealt_as_saved(
    directory: str, data_of: Callable[[int], elastic_data.ElasticData]
) -> Callable[[int], elastic_data.ElasticData]:
    # The same data, with records dealt to shards as in the run's oldest state: by an
    # older program, perhaps.
    from elastic_ckpt.checkpoint import summary
    from elastic_ckpt.cli import audit_documents
    from elastic_ckpt.data import sharded_data, stages

    steps = summary.steps(run_directory.saved_steps_of(directory))
    states = (
        saved.state
        for step in sorted(steps)
        for saved in audit_documents.saved_at(step, steps[step])
    )
    oldest = next(states, None)
    if oldest is None:
        return data_of

    def dealt(attempt: int) -> elastic_data.ElasticData:
        data = data_of(attempt)
        if isinstance(data, sharded_data.ShardedData | stages.StagedData):
            return data.dealt_as(oldest.pipeline)
        return data

    return dealt


def outcome_of(directory: str, *, data: str | None = None) -> audit.Audit:
    """Audits the run in `directory`.

    Args:
      directory: of the run.
      data: `MODULE:NAME` of the data, if a loop of the user's own has trained on it.

    Raises:
      RunError: if there is no run.
      ConfigError: if its data is not named, or is named and in its configuration.
      DataError: if it has trained nothing, or its data cannot be read.
    """
    from elastic_ckpt.checkpoint import summary
    from elastic_ckpt.data import positional_data
    from elastic_ckpt.training import audit, step_log

    run = run_of(directory, data=data)
    attempts = run.attempts
    saved = max(summary.steps(run_directory.saved_steps_of(directory)), default=0)
    missing: Callable[..., str]
    is_maxtext = False
    if run.config is None:
        assert run.own is not None
        missing = _own_missing(run.own)
    else:
        # MaxText names a save by its last step, counted from 0.
        is_maxtext = bool(run.config.deploy.maxtext)
        missing = functools.partial(_missing_checkpoint, run.config)
    last, start_step = run.data_of(attempts[-1].attempt), attempts[0].start_step
    return audit.audit(
        attempts,
        run.data_of,
        is_in_order=run.is_in_order,
        num_records=last.num_records()
        if isinstance(last, positional_data.PositionalData)
        else None,
        num_saved_steps=saved + is_maxtext if saved else 0,
        first_step=run.first_step,
        missing_checkpoint=missing(
            finished=run_directory.is_finished(directory),
            num_steps=start_step + len(step_log.lineage(attempts)) - is_maxtext,
            start_step=start_step,
            saved=saved,
        ),
    )


def _sections(
    config: schema.Config, attempts: list[step_log.Attempt]
) -> Callable[[int], data_keys.DataKeys]:
    # The configuration of the data of each attempt.
    logged = {attempt.attempt: attempt.data for attempt in attempts}

    @functools.cache
    def section(attempt: int) -> data_keys.DataKeys:
        values: dict[str, Any] = {**keys.values(config), **logged[attempt]}
        return load.from_values(values, place=f"the log of attempt {attempt}").data

    return section


def _configured_data(
    section: Callable[[int], data_keys.DataKeys],
) -> Callable[[int], elastic_data.ElasticData]:
    from elastic_ckpt.data.lm import pipeline

    return lambda attempt: pipeline.from_config(section(attempt))


def _own_data(
    directory: str, named: str | None
) -> Callable[[int], elastic_data.ElasticData]:
    from elastic_ckpt.data import elastic_data

    if named is None:
        raise errors.ConfigError(
            f"{directory} was recorded by your own training loop, whose data is"
            " defined in its program; name it with --data MODULE:NAME"
        )
    module, _, name = named.partition(":")
    # As `python -m` does.
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ConfigError(
            f"--data {named}: {error}; write MODULE:NAME, of a module that can be"
            " imported here"
        ) from error
    finally:
        sys.path.pop(0)
    if callable(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"--data {named}: {name} cannot be called without arguments ({error});"
                " name the data, as ec.batches was given it, or a function that returns"
                " it"
            ) from None
    data = found() if callable(found) else found
    elastic_data.check(data, caller=f"--data {named}")
    return lambda _: data


def _own_missing(own: run_directory.OwnLoop) -> Callable[..., str]:
    from elastic_ckpt.training import audit

    if not own.persistent:
        return lambda **_: ""
    return functools.partial(audit.missing_checkpoint, period=own.every, at_end=False)


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
    if outcome.stage_steps:
        begins = ", ".join(map(str, outcome.stage_steps))
        lines.append(f"stages of the data begin at steps {begins}")
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
