"""The arguments `CONFIG key=value...`, which multiple verbs accept."""

from __future__ import annotations

import argparse


def add_arguments(
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
