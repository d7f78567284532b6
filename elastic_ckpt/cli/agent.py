"""`elastic-ckpt agent DIRECTORY`: serves a machine's RAM disk to its peers."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import math
import os
import signal
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.cli import option_numbers
from elastic_ckpt.core import errors
from elastic_ckpt.steps import owners
from elastic_ckpt.tiers.peers import agent, agent_server

_OPTIONS: Mapping[str, Any] = {
    "root": {
        "metavar": "directory",
        "help": "the RAM disk directory to serve",
    },
    "--interface": {
        "default": "127.0.0.1",
        "help": "the name or address at which other machines reach this one; with TLS,"
        " the name in the certificate",
    },
    "--port": {
        "type": option_numbers.port,
        "default": 0,
        "help": "the port to listen on; by default the system chooses one",
    },
    "--secret-file": {
        "help": "a file with the run's secret; by default DIRECTORY/secret"
    },
    "--tls-certificate": {
        "help": "a PEM file with this machine's certificate; enables TLS"
    },
    "--tls-key": {"help": "a PEM file with the certificate's private key"},
    "--until-stdin-closes": {
        "action": "store_true",
        "help": "exit when standard input is closed",
    },
}
_NODE_OPTIONS: Mapping[str, Any] = {
    "--node": {
        "action": "store_true",
        "help": "serve the RAM disks of all current and future runs in the directory",
    },
    "--domains": {
        "default": "",
        "help": "failure domains of the node, such as rack=r7;zone=us-east5-a",
    },
    "--kubernetes-node": {
        "metavar": "NAME",
        "help": "the node's name, to read its failure domains from its Kubernetes"
        " labels",
    },
    "--domain-labels": {
        "default": "",
        "help": "additional labels to read, by kind of domain: rack=example.com/rack",
    },
    "--remove-unused-after": {
        "type": option_numbers.positive_number,
        "metavar": "SECS",
        "help": "remove a run directory that no process has used for this long",
    },
    "--max-bytes": {
        "type": option_numbers.positive_count,
        "help": "maximum total bytes of all runs; above it, remove the"
        " longest-unused runs",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    of_node = parser.add_argument_group("the agent of a node")
    for group, options in ((parser, _OPTIONS), (of_node, _NODE_OPTIONS)):
        for name, option in options.items():
            group.add_argument(name, **option)
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
        return _serve(arguments)
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
        _service(arguments),
        steps=arguments.follow,
        backups=backups,
        tls_ca=arguments.tls_ca,
        max_bytes_per_sec=arguments.max_bytes_per_sec,
    )
    return 0


def _service(arguments: argparse.Namespace) -> agent.Service:
    return agent.Service(
        **{
            each.name: getattr(arguments, each.name)
            for each in dataclasses.fields(agent.Service)
        }
    )


def _serve(arguments: argparse.Namespace) -> int:
    # Prints the agent's address.
    serving = functools.partial(agent_server.serve, _service(arguments))
    if arguments.node:
        serving = functools.partial(
            agent_server.serve_node,
            _service(arguments),
            domains=agent_server.node_domains(
                owners.parse_domains(arguments.domains, what="--domains"),
                arguments.kubernetes_node,
                owners.parse_domains(arguments.domain_labels, what="--domain-labels"),
            ),
            unused_after=arguments.remove_unused_after or math.inf,
            max_bytes=arguments.max_bytes or math.inf,
        )
    elif any(getattr(arguments, name[2:].replace("-", "_")) for name in _NODE_OPTIONS):
        raise errors.ConfigError(
            f"{', '.join(_NODE_OPTIONS)} apply only to a node's agent; add --node"
        )

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        if arguments.until_stdin_closes:
            # Not `sys.stdin`: an exiting interpreter would wait for its lock.
            loop.add_reader(0, lambda: os.read(0, 4096) or ended.set())
        await serving(ended, announce=functools.partial(print, flush=True))

    asyncio.run(main())
    return 0
