"""`elastic-ckpt modify STEP_PATH --set PATH=VALUE`: edits values in the newest step.

It loads the step and saves it again, so the host needs memory for the whole step, and
no run may be writing to the directory. A restarted run continues from the new save,
which replaces the old one. To keep the old save, copy the step directory first.
"""

from __future__ import annotations

import argparse
import contextlib

import jax

from elastic_ckpt import frontend
from elastic_ckpt.cli import modified_step
from elastic_ckpt.core import errors, storage
from elastic_ckpt.inspect import run_files, tier_locations
from elastic_ckpt.tiers.choices import Persistent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "path",
        metavar="STEP_PATH",
        help="the step directory of a run's newest step in persistent storage",
    )
    parser.add_argument(
        "--tree",
        default="state",
        metavar="NAME",
        help="the pytree to edit; by default state",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="set a value, such as step=100; may be repeated",
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="PATH=FACTOR",
        help="multiply a value; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the changes without writing them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Edits the step unless its run is alive."""
    name = arguments.tree
    edits = [_edit(name, each, is_factor=False) for each in arguments.set]
    edits += [_edit(name, each, is_factor=True) for each in arguments.scale]
    if not edits or len({each.path for each in edits}) < len(edits):
        raise errors.ConfigError(
            "specify at least one edit with --set PATH=VALUE or --scale PATH=FACTOR,"
            " and use each PATH only once"
        )
    path = storage.absolute(arguments.path)
    if not (path.name.isdecimal() and tier_locations.is_step(path)):
        raise errors.CheckpointError(
            f"{path} is not a step directory; specify PERSISTENT_DIRECTORY/<step>"
        )
    number = int(path.name)
    tiers = [Persistent(path.parent, every=1)]
    with contextlib.ExitStack() as stack:
        # An elastic run's supervisor holds the run's lock even between worlds.
        lock = path.parent.parent / run_files.LOCK
        if run_files.is_run(lock.parent) and not arguments.dry_run:
            stack.enter_context(storage.exclusive_lock(lock))
        # Otherwise, JAX would truncate 64-bit leaves to 32 bits.
        stack.enter_context(jax.enable_x64(True))
        checkpointer = stack.enter_context(
            frontend.Checkpointer(tiers, read_only=arguments.dry_run)
        )
        saved = checkpointer.checkpointables_metadata(number)
        loaded = checkpointer.load_checkpointables(
            number,
            {
                each: modified_step.StoredFiles() if tree is None else None
                for each, tree in saved.metadata.items()
            },
        )
        if saved.metadata.get(name) is None:
            trees = [each for each, tree in saved.metadata.items() if tree is not None]
            raise errors.CheckpointError(
                f"step {number} has no pytree {name!r}; its pytrees are"
                f" {sorted(trees)}. To edit a component, load it in Python, change its"
                " state, and save it with overwrite=True"
            )
        for each in edits:
            loaded[name], line = modified_step.edit(name, loaded[name], each)
            print(line)
        if arguments.dry_run:
            print("nothing was written")
            return 0
        checkpointer.save_checkpointables(
            number,
            loaded,
            overwrite=True,
            metrics=saved.metrics,
            custom_metadata=saved.custom_metadata,
        )
    print(f"{path}: saved again, with these changes")
    return 0


def _edit(tree: str, given: str, *, is_factor: bool) -> modified_step.Edit:
    path, _, number = given.rpartition("=")
    if not (path and number):
        raise errors.ConfigError(
            f"{given!r} is not an edit; use PATH={'FACTOR' if is_factor else 'VALUE'}"
        )
    whole = tree if path == "." else f"{tree}/{path}"
    return modified_step.Edit(whole, number, is_factor)
