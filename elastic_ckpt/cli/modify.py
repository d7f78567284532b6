"""`elastic-ckpt modify STEP_PATH --set PATH=VALUE`: edits numbers of a saved step.

The step is saved once more, under a new save, and a run that is started then continues
from it. The version before is set aside, and shown by `inspect`, until retention takes
it. With `--component` the numbers are those of a component, in the states of all hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os

from etils import epy

from elastic_ckpt.core import errors, storage

with epy.lazy_imports():
    from elastic_ckpt.checkpoint import modified_step, number_edit
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
    edits = [
        *(_edit(each, "--set") for each in arguments.set),
        *(_edit(each, "--scale") for each in arguments.scale),
    ]
    twice = {each.path for each in edits}
    if not edits or len(twice) < len(edits):
        raise errors.ConfigError(
            "give each number that is to be edited once, with --set or --scale"
            if edits
            else "nothing is to be edited; add --set PATH=VALUE or --scale PATH=FACTOR"
        )
    with contextlib.ExitStack() as locks:
        step = modified_step.ModifiedStep(arguments.path)
        if not arguments.dry_run:
            _lock_run(arguments.path, locks)
            locks.enter_context(step.alone(is_stopped=arguments.stopped))
            # The run may have saved until then.
            step = modified_step.ModifiedStep(arguments.path)
        changes = step.changes(arguments.component, edits)
        for each in changes:
            print(each)
        if arguments.dry_run:
            print("nothing was written")
            return 0
        save = step.modify(changes)
    print(f"{arguments.path}: saved again as {save}; the version before is set aside")
    return 0


def _lock_run(path: str, locks: contextlib.ExitStack) -> None:
    # The supervisor of an elastic run holds this lock between two worlds, too.
    run = storage.absolute(path).parent.parent
    lock = os.path.join(run, run_files.LOCK)
    if storage.is_local(path) and run_files.is_run(os.fspath(run)):
        locks.enter_context(storage.exclusive_lock(lock))


def _edit(given: str, option: str) -> number_edit.Edit:
    path, equals, value = given.rpartition("=")
    if not (path and equals and value):
        raise errors.ConfigError(f"{option} {given!r}: write PATH=VALUE")
    if option == "--set":
        return number_edit.Edit(path=path, value=value)
    try:
        float(value)
    except ValueError:
        raise errors.ConfigError(
            f"{option} {given!r}: the factor is not a number"
        ) from None
    return number_edit.Edit(path=path, factor=value)
