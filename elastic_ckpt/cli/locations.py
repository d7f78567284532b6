"""Arguments that name checkpoints, by path or peer; the same for every verb."""

from __future__ import annotations

import argparse
import contextlib

from etils import epy

with epy.lazy_imports():
    from elastic_ckpt.inspect import tier_locations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name paths and peers."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="the directory of a run (with its steps in the RAM of this machine), a RAM"
        " disk, a directory of steps, or one step; several are searched together",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="the URL of another machine's agent; may be repeated",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the secret of the run; by default that of the RAM disk at"
        " PATH",
    )
    parser.add_argument(
        "--tls-authority",
        help="a PEM file with the authority that signs the agents' certificates",
    )
    parser.add_argument(
        "--run",
        help="the identity of the run, if PATH has steps of several; by default the"
        " first",
    )


def opened(
    arguments: argparse.Namespace,
) -> contextlib.AbstractContextManager[tuple[str, tier_locations.Locations]]:
    """The run and the places that `arguments` name; see `tier_locations.opened`."""
    return tier_locations.opened(
        arguments.paths,
        peers=arguments.peer,
        run=arguments.run,
        secret_file=arguments.secret_file,
        tls_authority=arguments.tls_authority,
    )
