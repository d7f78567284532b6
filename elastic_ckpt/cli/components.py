"""`elastic-ckpt components PATH...`: the parts of a step, and how hosts share them.

It shows those of the newest complete step, or of `--step`: the pattern, files, sizes,
hosts and digests, and whether a component was declared as required and with which rule
for another number of hosts. The program that loads it declares its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from elastic_ckpt.cli import locations, tier_report
from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.training import run_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    locations.add_arguments(parser)
    parser.add_argument(
        "--step",
        type=option_numbers.count,
        help="the step to show; by default the newest",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the components."""
    from elastic_ckpt.inspect import step_components
    from elastic_ckpt.steps import search

    with locations.opened(arguments) as (_, tiers):
        asked = arguments.step
        problems: list[str] = []
        numbers = list(reversed(tiers.steps)) if asked is None else [asked]
        for number in numbers:
            copies, problems = tiers.look(number)
            newest = search.newest(list(copies))
            if newest is None or (
                asked is None and tiers.line.abandons(newest.step_id)
            ):
                continue
            parts = step_components.components(newest, copies)
            if arguments.json:
                content = {
                    "step": number,
                    "save": newest.save,
                    "components": [dataclasses.asdict(each) for each in parts],
                }
                print(json.dumps(content, indent=2))
            else:
                print(f"step {number}, save {newest.save}")
                print("\n".join(tier_report.component_lines(parts)))
            return 0
        if not numbers:
            _refuse_plain(arguments.paths)
        step = "step" if asked is None else f"step {asked}"
        raise errors.CheckpointError(
            "; ".join([f"no {step} is complete in the given places", *problems])
            if numbers
            else "there are no steps in the given places; give the directory of a tier"
        )


def _refuse_plain(paths: Sequence[str]) -> None:
    # Steps of Orbax's own checkpointer, which MaxText uses without tiers.
    from elastic_ckpt.checkpoint import summary

    for path in paths:
        steps = run_directory.saved_steps_of(path) if locations.is_run(path) else path
        if plain := summary.steps(steps):
            raise errors.CheckpointError(
                f"the steps in {steps}, {max(plain)} the newest, are Orbax's own: they"
                " have no manifest that lists their components, as steps in tiers"
                f" have; `elastic-ckpt inspect {path}` shows their arrays"
            )
