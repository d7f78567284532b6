"""`elastic-ckpt inspect PATH...`: lists a run's steps and the tiers that hold them.

It accepts a run directory, RAM disks and directories of steps. It shows steps and their
holders, and the arrays and data state of steps in storage. By default, it summarizes
the newest complete step; with --step, it shows one step with all of its arrays; with
--all, every step. The JSON output includes all steps unless --step selects one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from elastic_ckpt.cli import option_numbers, shared
from elastic_ckpt.core import errors
from elastic_ckpt.inspect import run_files, survey, tier_locations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    shared.add_locations(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        type=option_numbers.count,
        help="show this step and all of its arrays",
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="show every step; by default only the newest",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the run."""
    paths, step = arguments.paths, arguments.step
    is_brief = step is None and not arguments.all
    newest_only = is_brief and not arguments.json
    with tier_locations.opened(paths, secret_file=arguments.secret_file) as opened:
        name, tiers = opened
        report = survey.survey(tiers, step=step, newest_only=newest_only)
    is_any = report.known or report.leftovers or report.problems
    if not (is_any or any(map(run_files.is_run, paths))):
        raise errors.RunError(
            f"{', '.join(paths)}: found neither a run directory (one that contains"
            f" {run_files.RECORD}) nor a directory with steps of any tier; specify"
            " base_output_directory/run_name, or the directory with the steps"
        )
    if step is not None and step not in report.known:
        raise errors.CheckpointError(
            f"there is no step {step} in these locations; they contain steps"
            f" {list(report.known)}"
        )
    content = {"run": name, **dataclasses.asdict(report)}
    print(
        json.dumps(content, indent=2)
        if arguments.json
        else survey.describe(name, report, is_brief=is_brief)
    )
    return 0
