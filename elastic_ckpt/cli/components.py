"""`elastic-ckpt components PATH...`: the parts of a step, and how hosts share them.

It shows those of the newest complete step, or of `--step`: the pattern, files, sizes,
hosts and digests, and whether a component was declared as required and with which rule
for another number of hosts. The program that loads it declares its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from etils import epy

from elastic_ckpt.cli import locations
from elastic_ckpt.core import errors, option_numbers

with epy.lazy_imports():
    from elastic_ckpt.checkpoint import summary
    from elastic_ckpt.inspect import run_files, survey
    from elastic_ckpt.steps import search


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
    with locations.opened(arguments) as (_, tiers):
        asked = arguments.step
        problems: list[str] = []
        numbers = tiers.steps[::-1] if asked is None else [asked]
        for number in numbers:
            copies, problems = tiers.look(number)
            newest = search.newest(list(copies))
            if newest is None or (
                asked is None and tiers.line.abandons(newest.step_id)
            ):
                continue
            parts = survey.components(newest, copies)
            content = {
                "step": number,
                "save": newest.save,
                "components": [dataclasses.asdict(each) for each in parts],
            }
            lines = [f"step {number}, save {newest.save}"]
            lines += survey.component_lines(parts)
            print(json.dumps(content, indent=2) if arguments.json else "\n".join(lines))
            return 0
    if numbers:
        step = "step" if asked is None else f"step {asked}"
        raise errors.CheckpointError(
            "; ".join([f"no {step} is complete in the given places", *problems])
        )
    # Steps of Orbax's own checkpointer, which MaxText uses without tiers.
    for path in arguments.paths:
        is_run = run_files.is_run(path)
        steps = run_files.RunFiles.read(path).steps if is_run else path
        if plain := summary.steps(steps):
            raise errors.CheckpointError(
                f"the steps in {steps}, {max(plain)} the newest, are Orbax's own: they"
                " have no manifest that lists their components, as steps in tiers"
                f" have; `elastic-ckpt inspect {path}` shows their arrays"
            )
    raise errors.CheckpointError(
        "there are no steps in the given places; give the directory of a tier"
    )
