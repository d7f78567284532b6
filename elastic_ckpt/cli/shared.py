"""Arguments that multiple verbs accept."""

from __future__ import annotations

import argparse


def add_config(
    parser: argparse.ArgumentParser, *, example: str, is_required: bool = True
) -> None:
    """Adds a configuration file, such as `example`, and overrides."""
    parser.add_argument(
        "config",
        nargs=None if is_required else "?",
        help=f"a YAML file, for example {example}",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the file's",
    )


def add_locations(parser: argparse.ArgumentParser) -> None:
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
