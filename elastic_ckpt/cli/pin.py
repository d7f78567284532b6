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
        help="a step directory in persistent storage, or on any host's RAM disk, which"
        " pins the step on all hosts",
    )
    parser.add_argument(
        "--undo", action="store_true", help="let the steps be deleted again"
    )


def run(arguments: argparse.Namespace) -> int:
    """Pins or unpins all of the steps, or none if a path is invalid."""
    for path in arguments.paths:
        if not tier_locations.is_step(path):
            raise errors.CheckpointError(
                f"{path} is not a step directory; specify"
                " PERSISTENT_DIRECTORY/<step> or RAM_DISK/hosts/<slot>/<step>-<save>"
            )
    change = preserved.unpin if arguments.undo else preserved.pin
    for path in arguments.paths:
        change(path)
        print(f"{path}: {'not pinned' if arguments.undo else 'pinned'}")
    return 0
