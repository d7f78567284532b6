"""`elastic-ckpt inspect PATH...`: the steps of a run, and in which tiers they are.

For the directory of a run it shows arrays and data state; for RAM disks and persistent
steps the steps and their holders; for a run whose steps are in tiers both. It shows the
newest step briefly, with --step one step with all of its arrays and components, with
--all every step. The JSON has all steps unless --step names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from elastic_ckpt.cli import locations
from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.inspect import run_files, stored_steps, survey, tier_locations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    locations.add_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        type=option_numbers.count,
        help="show this step, and all of its arrays",
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="show every step; by default only the newest",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the run."""
    content: dict[str, Any] = {}
    lines: list[str] = []
    known: set[int] = set()
    paths, step = arguments.paths, arguments.step
    is_run = len(paths) == 1 and run_files.is_run(paths[0])
    is_brief = step is None and not arguments.all
    newest_only = is_brief and not arguments.json
    if is_run:
        stored = stored_steps.collect(paths[0], step=step, newest_only=newest_only)
        content |= dataclasses.asdict(stored)
        known.update(stored.known)
        numbered = survey.numbered(stored.known, "in storage")
        lines.append(stored_steps.describe(stored, known=numbered, is_brief=is_brief))
    with tier_locations.opened(paths, secret_file=arguments.secret_file) as opened:
        name, tiers = opened
        # Without manifests there are no tiers.
        if tiers.steps or not is_run:
            report = survey.survey(tiers, step=step, newest_only=newest_only)
            if not (report.known or report.leftovers or report.problems or is_run):
                raise errors.RunError(
                    f"{', '.join(paths)}: this is neither the directory of a run (it"
                    f" contains no {run_files.RECORD}) nor one with steps of any tier;"
                    " give base_output_directory/run_name, or the directory with the"
                    " steps"
                )
            content["tiers"] = {"run": name, **dataclasses.asdict(report)}
            known.update(report.known)
            lines.append(survey.describe(name, report))
    if step is not None and step not in known:
        raise errors.CheckpointError(
            f"there is no step {step} in the given places; they contain the steps"
            f" {sorted(known)}"
        )
    print(json.dumps(content, indent=2) if arguments.json else "\n".join(lines))
    return 0
