"""`elastic-ckpt config FILE key=value...`: prints the configuration that would run."""

from __future__ import annotations

import argparse
import os
import sys

from elastic_ckpt.cli import shared
from elastic_ckpt.training import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    shared.add_config(parser, example="configs/demo_cpu.yml", is_required=False)
    parser.epilog = "Without a file, prints every key with its meaning and default."


def run(arguments: argparse.Namespace) -> int:
    """Prints every key with its value and its origin."""
    if arguments.config is None:
        sys.stdout.write(load.base_yaml())
        return 0
    given = arguments.config, arguments.overrides
    here = os.getcwd() + os.sep
    settings = load.settings(*given).items()
    origins = {key: each.place.replace(here, "") for key, each in settings}
    sys.stdout.write(load.resolved_yaml(load.load(*given), origins))
    return 0
