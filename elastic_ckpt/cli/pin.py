"""`elastic-ckpt pin STEP_PATH...`: keeps steps that retention would remove."""

from __future__ import annotations

import argparse

from elastic_ckpt.core import errors
from elastic_ckpt.inspect import tier_locations
from elastic_ckpt.tiers import preserved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="STEP_PATH",
        help="the directory of a step in persistent storage, or on the RAM disk of any"
        " host, which counts for all hosts",
    )
    parser.add_argument("--undo", action="store_true", help="let them be deleted again")


def run(arguments: argparse.Namespace) -> int:
    """Marks the steps, all or none."""
    for path in arguments.paths:
        if not tier_locations.is_step(path):
            raise errors.CheckpointError(
                f"{path} is not the directory of a step; name"
                " PERSISTENT_DIRECTORY/<step> or RAM_DISK/hosts/<slot>/<step>-<save>"
            )
    change = preserved.unpin if arguments.undo else preserved.pin
    for path in arguments.paths:
        change(path)
        print(f"{path}: {'not pinned' if arguments.undo else 'pinned'}")
    return 0
