"""Arguments that name checkpoints; the same for every verb."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths, and the secret for the RAM of other machines."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="the directory of a run (with its steps in the RAM of this machine), a RAM"
        " disk, a directory of steps, or one step; several are searched together",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the secret of the run (RAM_DISK/secret on its machines), to"
        " search their RAM, too, through the agents that are recorded beside its steps",
    )
