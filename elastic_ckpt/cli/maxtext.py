"""`elastic-ckpt maxtext ARGS...`: MaxText with elastic data, on any number of hosts."""

from __future__ import annotations

import argparse
import sys

from etils import epy

from elastic_ckpt.monitoring import progress

with epy.lazy_imports():
    from elastic_ckpt.elastic import termination
    from elastic_ckpt.integrations import maxtext, maxtext_keys, maxtext_worlds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="as for MaxText's trainer: a YAML file and key=value settings, which may"
        " include elastic_ckpt's keys",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains or continues a MaxText run."""
    of_maxtext = arguments.arguments
    config = maxtext_keys.supervised(maxtext_keys.given(of_maxtext))
    shown = progress.Progress(log_period=1, stream=sys.stdout)
    with termination.ending("elastic-ckpt maxtext"):
        if config.world.hosts > 1:
            with shown:
                is_stopped = maxtext_worlds.run(config, of_maxtext, emit=shown)
        else:
            is_stopped = maxtext.run(of_maxtext, emit=shown, started=config)
    return termination.exit_code() if is_stopped else 0
