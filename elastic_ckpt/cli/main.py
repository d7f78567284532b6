"""The `elastic-ckpt` command."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from etils import epy

from elastic_ckpt.core import bucket_clients, errors, storage_cause

with epy.lazy_imports():
    from elastic_ckpt.elastic import termination
    from elastic_ckpt.training import load, run_directory

# Verb, one line of help; the module of that name defines `add_arguments` and `run`.
VERBS = {
    "train": "train a model, or continue a run, on the hosts that the configuration"
    " names",
    "scale": "continue a live run on another number of slices",
    "config": "print the configuration that would run, and where each key is set",
    "data": "write a directory of texts as one file of training data",
    "audit": "prove that a run trained on the batches of a one-host run, each once",
    "plan": "show which host would read which shards of the data",
    "simulate": "show what failures would cost a run, for several settings side by"
    " side",
    "maxtext": "run MaxText with elastic data, on any number of hosts",
    "agent": "serve a machine's RAM disk to the other machines of a run",
    "status": "show how far a run is, its hosts, its newest steps, and what a loss"
    " would cost",
    "report": "write an HTML page about a run, with plots",
    "inspect": "show the steps of a run: their arrays, their data state, and the tiers"
    " that have them",
    "verify": "read every copy of a checkpoint, in every tier, and compare them",
    "convert": "convert a checkpoint, of this or another program, to another layout",
    "modify": "change numbers in the newest step, such as the learning rate",
    "pin": "keep steps that would otherwise be deleted",
}
_IS_SETTING = re.compile(r"\w+=").match
# Verbs that launchers start again when they fail.
_LAUNCHED = ("train", "maxtext")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Returns:
      0 on success, 1 if there was an error or an audit failed, 78 if the configuration
      of a run is wrong, 130 on Ctrl-C, 143 on SIGTERM, 141 if the reader of the output
      closed it.
    """
    parser = build_parser()
    parsed = _parsed(parser, arguments)
    try:
        return parsed.execute(parsed)
    except errors.ElasticCkptError as error:
        return _failed(parsed.verb, error)
    except KeyboardInterrupt:
        print(f"elastic-ckpt {parsed.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`); Python's last flush must not
        # report it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except bucket_clients.failures() as error:
        told = storage_cause.explained(error, _place(parsed))
        if told is None:
            raise
        return _failed(parsed.verb, told)


def _failed(verb: str, error: errors.ElasticCkptError) -> int:
    print(f"elastic-ckpt {verb}: {error}", file=sys.stderr)
    if isinstance(error, errors.StoppedError):
        return termination.exit_code()
    is_futile = verb in _LAUNCHED and isinstance(error, errors.ConfigError)
    return errors.CONFIG_EXIT_CODE if is_futile else 1


def _place(parsed: argparse.Namespace) -> str:
    # What a verb reads or writes: the directory of its run, or its first argument.
    if parsed.verb != "train":
        names = ("run", "path", "paths", "source", "directory", "config")
        given = next((vars(parsed)[name] for name in names if name in parsed), "")
        return " ".join(given) if isinstance(given, list) else str(given)
    return run_directory.path_of(load.load(parsed.config, parsed.overrides))


def _parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    # argparse takes no further `key=value` once an option has followed the file.
    given = sys.argv[1:] if arguments is None else arguments
    parsed, rest = parser.parse_known_args(given)
    if rest and not (hasattr(parsed, "overrides") and all(map(_IS_SETTING, rest))):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="elastic-ckpt", description="Elastic data and checkpoints for JAX."
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="show the versions of what is installed",
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        # The modules of the verbs import JAX and Orbax only where they run.
        module = importlib.import_module(f"elastic_ckpt.cli.{verb}")
        subparser = subparsers.add_parser(verb, help=summary, description=summary)
        module.add_arguments(subparser)
        subparser.set_defaults(execute=module.run)
    return parser


class _Version(argparse.Action):
    # Reads the versions only when they are requested.

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("jax", "orbax-checkpoint", "grain")
        with_versions = [f"{name} {metadata.version(name)}" for name in names]
        python = ".".join(map(str, sys.version_info[:3]))
        print(
            f"elastic-ckpt {metadata.version('elastic-ckpt')}"
            f" ({', '.join(with_versions)}, Python {python})"
        )
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
