"""`elastic-ckpt config FILE key=value...`: prints the configuration that would run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Collection

from etils import epy

from elastic_ckpt.cli import overrides
from elastic_ckpt.core import errors
from elastic_ckpt.training import keys, load

with epy.lazy_imports():
    from elastic_ckpt.integrations import maxtext_hooks, maxtext_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    overrides.add_arguments(parser, example="configs/demo_cpu.yml", is_required=False)
    parser.epilog = "Without a file it prints every key with its meaning and default."


def run(arguments: argparse.Namespace) -> int:
    """Prints every key with its value and its origin."""
    if arguments.config is None:
        sys.stdout.write(keys.base_yaml())
        return 0
    given = arguments.config, arguments.overrides
    places = load.origins(*given)
    _refuse_maxtext(arguments.config, places)
    origins = {
        key: place.replace(os.getcwd() + os.sep, "") for key, place in places.items()
    }
    sys.stdout.write(keys.resolved_yaml(load.load(*given), origins))
    return 0


def _refuse_maxtext(path: str, given: Collection[str]) -> None:
    # Files of MaxText's keys are read by another verb.
    theirs = set(given) - set(keys.keys())
    if not theirs or importlib.util.find_spec("maxtext") is None:
        return
    if theirs <= set(maxtext_hooks.keys()):
        raise errors.ConfigError(
            f"{path} has keys of MaxText, such as {min(theirs)}:"
            f" `elastic-ckpt maxtext {path}` runs it; our keys in such a file are"
            f" {', '.join(sorted(maxtext_keys.OWN_KEYS))}, which"
            " `elastic-ckpt config` explains"
        )
