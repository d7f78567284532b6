"""The `elastic-ckpt` command."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from importlib import metadata

from elastic_ckpt.core import bucket_clients, errors, storage_cause
from elastic_ckpt.elastic import termination

# One line of help per verb; the module of that name has `add_arguments` and `run`.
VERBS = {
    "train": "train a model, or continue a run, on the configured hosts",
    "scale": "ask a live run to continue on a different number of slices",
    "config": "print the configuration that would run, and where each key is set",
    "data": "write a directory of text files as one file of training data",
    "audit": "check that a run trained on each batch of a one-host run exactly once",
    "plan": "show which host would read which shards of the data",
    "simulate": "show what failures would cost a run, and how much a spare slice or"
    " different save periods would help",
    "maxtext": "run MaxText with elastic data, on any number of hosts",
    "agent": "serve a machine's RAM disk to the other machines of a run",
    "status": "show a run's progress, hosts and newest steps, and what a loss would"
    " cost",
    "report": "write an HTML page about a run, with plots",
    "inspect": "show the steps of a run: their arrays, their data state, and the tiers"
    " that contain them",
    "verify": "read every copy of a checkpoint in every tier, and check its digests",
    "convert": "convert a checkpoint of this or another library to a different layout",
    "modify": "change values in the newest step, such as the learning rate",
    "pin": "keep steps that would otherwise be deleted",
}
_IS_SETTING = re.compile(r"\w+=").match
# Verbs that launchers restart when they fail.
_LAUNCHED = ("train", "maxtext")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Returns:
      0 on success, 1 if there was an error or an audit or verification failed, 78 if
      the configuration of a run is invalid, 130 on Ctrl-C, 143 on SIGTERM, or 141 if
      the reader of the output closed the pipe.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parsed = _parsed(words)
    try:
        return parsed.execute(parsed)
    except KeyboardInterrupt:
        print(f"elastic-ckpt {parsed.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`), and Python's last flush must not
        # report that again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (errors.ElasticCkptError, *bucket_clients.failures()) as error:
        told = error
        if not isinstance(error, errors.ElasticCkptError):
            place = next((word for word in words if "://" in word), "storage")
            told = storage_cause.explained(error, place)
        if told is None:
            raise
        print(f"elastic-ckpt {parsed.verb}: {told}", file=sys.stderr)
        if isinstance(told, errors.StoppedError):
            return termination.exit_code()
        is_futile = parsed.verb in _LAUNCHED and isinstance(told, errors.ConfigError)
        return errors.CONFIG_EXIT_CODE if is_futile else 1


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    # argparse does not accept `key=value` after an option that follows the file.
    parser = build_parser(words[:1])
    parsed, rest = parser.parse_known_args(words)
    if rest and not (hasattr(parsed, "overrides") and all(map(_IS_SETTING, rest))):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def build_parser(verbs: Collection[str] = VERBS.keys()) -> argparse.ArgumentParser:
    """The command-line parser.

    Args:
      verbs: the verbs whose arguments to add. Adding them imports the verbs' modules,
        many of which import JAX and Orbax.
    """
    parser = argparse.ArgumentParser(
        prog="elastic-ckpt", description="Elastic data and checkpoints for JAX."
    )
    version = f"elastic-ckpt {metadata.version('elastic-ckpt')}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        subparser = subparsers.add_parser(verb, help=summary, description=summary)
        if verb in verbs:
            module = importlib.import_module(f"elastic_ckpt.cli.{verb}")
            module.add_arguments(subparser)
            subparser.set_defaults(execute=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
