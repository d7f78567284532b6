"""`elastic-ckpt agent DIRECTORY`: serves a machine's RAM disk to its peers."""

from __future__ import annotations

import argparse

from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.tiers.peers import agent, agent_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    agent_server.add_arguments(parser)
    backup = parser.add_argument_group("a backup host")
    backup.add_argument(
        "--backup",
        metavar="URLS",
        help="also keep a share of each step of a run; URLS lists the agents of all"
        " backup hosts of the run, including this one, as in peer_backup_urls",
    )
    backup.add_argument(
        "--follow",
        metavar="STEPS",
        help="the run's directory of steps in storage, where its agents are recorded",
    )
    backup.add_argument(
        "--tls-ca",
        help="a PEM file with the authority that signs the hosts' certificates",
    )
    backup.add_argument(
        "--max-bytes-per-sec",
        type=option_numbers.positive_number,
        help="the maximum number of bytes per second to copy from the run's hosts",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal stops it."""
    if not (arguments.backup or arguments.follow):
        return agent_server.run(arguments)
    if not (arguments.backup and arguments.follow and arguments.secret_file):
        raise errors.ConfigError(
            "a backup host needs --backup URLS, --follow STEPS and --secret-file,"
            " because it finds the run through the run's steps in storage and uses the"
            " run's secret (peer_secret_file)"
        )
    backups = arguments.backup.split(";")
    for url in backups:
        agent.check_url(url, what="--backup", needs_tls=arguments.tls_ca is not None)
    # Imported late to keep other agents small.
    from elastic_ckpt.checkpoint import backup_host

    backup_host.serve(
        agent_server.service_of(arguments),
        steps=arguments.follow,
        backups=backups,
        tls_ca=arguments.tls_ca,
        max_bytes_per_sec=arguments.max_bytes_per_sec,
    )
    return 0
