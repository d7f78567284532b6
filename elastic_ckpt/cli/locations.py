"""Arguments that specify checkpoints, the same for every verb."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths, and the secret for other machines' RAM."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a run directory (with its steps in this machine's RAM), a RAM disk, a"
        " directory of steps, or one step; multiple paths are searched together",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the run's secret (RAM_DISK/secret on its machines), to also"
        " search their RAM through the agents that are recorded next to its steps",
    )
