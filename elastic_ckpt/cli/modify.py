"""`elastic-ckpt modify STEP_PATH --set PATH=VALUE`: edits numbers of a saved step.

The step is saved once more, under a new save, and a run that is started then continues
from it. The version before is set aside, and shown by `inspect`, until retention takes
it. With `--component` the numbers are those of a component, in the states of all hosts.
"""

from __future__ import annotations

import argparse
import contextlib

from elastic_ckpt.checkpoint import modified_step, number_edit
from elastic_ckpt.core import errors, storage
from elastic_ckpt.inspect import run_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "path",
        metavar="STEP_PATH",
        help="the directory of a run's newest step in persistent storage",
    )
    parser.add_argument(
        "--component",
        default="state",
        metavar="NAME",
        help="the tree or component with the numbers; by default state",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="set a number, such as step=100; may be repeated",
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="PATH=FACTOR",
        help="multiply a number; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the changes, and write nothing"
    )
    parser.add_argument(
        "--stopped",
        action="store_true",
        help="confirm that no run writes to the bucket, as buckets have no locks",
    )


def run(arguments: argparse.Namespace) -> int:
    """Edits the step, unless its run is alive."""
    edits = [_edit(each, "value") for each in arguments.set]
    edits += [_edit(each, "factor") for each in arguments.scale]
    if not edits or len({each.path for each in edits}) < len(edits):
        raise errors.ConfigError(
            "give each number that is to be edited once: --set PATH=VALUE or --scale"
            " PATH=FACTOR"
        )
    path = arguments.path
    with contextlib.ExitStack() as locks:
        step = modified_step.ModifiedStep(path)
        if not arguments.dry_run:
            # The supervisor of an elastic run holds its lock between two worlds, too.
            run = storage.absolute(path).parent.parent
            if run_files.is_run(run):
                locks.enter_context(storage.exclusive_lock(run / run_files.LOCK))
            locks.enter_context(step.alone(is_stopped=arguments.stopped))
            # The run may have saved until then.
            step = modified_step.ModifiedStep(path)
        changes = step.changes(arguments.component, edits)
        for each in changes:
            print(each)
        if arguments.dry_run:
            print("nothing was written")
            return 0
        save = step.modify(changes)
    print(f"{path}: saved again as {save}; the version before is set aside")
    return 0


def _edit(given: str, field: str) -> number_edit.Edit:
    path, _, number = given.rpartition("=")
    if not (path and number):
        raise errors.ConfigError(f"{given!r}: write PATH={field.upper()}")
    return number_edit.Edit(path=path, **{field: number})
