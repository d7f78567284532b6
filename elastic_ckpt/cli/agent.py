"""`elastic-ckpt agent DIRECTORY`: serves the RAM disk of a machine to its peers."""

from __future__ import annotations

import argparse
import functools
import sys

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent_command

# By name: the command line is parsed, and words are completed, without NumPy.
_REFILL = "elastic_ckpt.checkpoint.host.node_refill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    agent_command.add_arguments(parser)
    backup = parser.add_argument_group("a backup host")
    backup.add_argument(
        "--backup",
        action="store_true",
        help="also fetch and keep copies of a run's steps, for peer_backup_urls",
    )
    backup.add_argument(
        "--tls-ca",
        help="a PEM file with the authority that signs the hosts' certificates",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the agent's address, and serves until a signal ends it."""
    if not arguments.backup:
        return agent_command.run(arguments, refill=(sys.executable, "-m", _REFILL))
    if arguments.node or arguments.until_stdin_closes:
        raise errors.ConfigError(
            "--backup holds copies of one run until a signal ends it; leave out --node"
            " and --until-stdin-closes"
        )
    from elastic_ckpt.application import backup_service

    backup_service.run(
        agent_command.service(arguments),
        tls_ca=arguments.tls_ca,
        announce=functools.partial(print, flush=True),
    )
    return 0
