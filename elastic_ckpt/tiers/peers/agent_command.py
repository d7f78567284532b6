"""The program of all agents, as `elastic-ckpt agent` and as a module.

    python -m elastic_ckpt.tiers.peers.agent_command /dev/shm/run --interface 10.0.0.7
    elastic-ckpt agent --node /mnt/runs --interface 10.0.0.7 --kubernetes-node node-7

It serves a machine or a node. The secret is in a file, never on
a command line: others on the machine could read it.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.tiers.peers import agent

_OF_NODE = (
    "domains",
    "kubernetes_node",
    "domain_labels",
    "remove_unused_after",
    "max_bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the agent's arguments."""
    parser.add_argument("directory", help="the directory of the RAM disk to serve")
    parser.add_argument(
        "--interface",
        default="127.0.0.1",
        help="the address to listen on, at which other machines reach this one",
    )
    parser.add_argument(
        "--port",
        type=option_numbers.port,
        default=0,
        help="the port to listen on; by default the system chooses one",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the secret of the run; by default DIRECTORY/secret",
    )
    parser.add_argument(
        "--tls-certificate",
        help="a PEM file with the certificate of this machine, to encrypt",
    )
    parser.add_argument(
        "--tls-key", help="a PEM file with the private key of the certificate"
    )
    parser.add_argument(
        "--max-bytes-per-sec",
        type=option_numbers.positive_number,
        help="the most bytes a second, to all clients together",
    )
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end when the standard input is closed, as by the program that started"
        " this",
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="serve although the directory has an agent, which does not answer; for the"
        " host that starts this and tells the others its address",
    )
    node = parser.add_argument_group("the agent of a node")
    node.add_argument(
        "--node",
        action="store_true",
        help="serve the RAM disks of all runs in the directory, those of later pods"
        " too",
    )
    node.add_argument(
        "--domains",
        default="",
        help="failure domains of the node, such as rack=r7;zone=us-east5-a",
    )
    node.add_argument(
        "--kubernetes-node",
        metavar="NAME",
        help="the node's name, to read its failure domains from its Kubernetes labels",
    )
    node.add_argument(
        "--domain-labels",
        default="",
        help="further labels to read, by kind of domain: rack=example.com/rack",
    )
    node.add_argument(
        "--remove-unused-after",
        type=option_numbers.positive_number,
        metavar="SECS",
        help="remove the directory of a run that no process has used for so long",
    )
    node.add_argument(
        "--max-bytes",
        type=option_numbers.positive_count,
        help="the most bytes of all runs; above it, remove the longest unused",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the agent's address, and serves until a signal ends it."""
    if not arguments.node and (given := [n for n in _OF_NODE if getattr(arguments, n)]):
        option = f"--{given[0].replace('_', '-')}"
        raise errors.ConfigError(f"{option} is for the agent of a node; add --node")
    service = of_arguments(arguments)
    serve = functools.partial(agent.serve, service)
    if arguments.node:
        serve = _of_node(arguments, service)
    announce = functools.partial(print, flush=True)
    agent.run(
        functools.partial(serve, announce=announce),
        until_stdin_closes=arguments.until_stdin_closes,
    )
    return 0


def of_arguments(arguments: argparse.Namespace) -> agent.Service:
    """The options of an agent, as they were given."""
    return agent.Service(
        root=arguments.directory,
        interface=arguments.interface,
        port=arguments.port,
        secret_file=arguments.secret_file,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        max_bytes_per_sec=arguments.max_bytes_per_sec,
        is_beside=arguments.beside,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent; returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description="Serve the RAM disk of a machine.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except errors.ElasticCkptError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 1


def _of_node(
    arguments: argparse.Namespace, service: agent.Service
) -> functools.partial[Any]:
    # The command line imports this module to complete words, and needs none of these.
    from elastic_ckpt.steps import failure_domains
    from elastic_ckpt.tiers.peers import kubernetes_node, node_agent, node_runs

    further = failure_domains.parse(arguments.domain_labels, what="--domain-labels")
    domains = failure_domains.parse(arguments.domains, what="--domains")
    if arguments.kubernetes_node:
        labels = kubernetes_node.read_labels(arguments.kubernetes_node)
        known = kubernetes_node.LABELS | further
        domains = kubernetes_node.domains(labels, known) | domains
    return functools.partial(
        node_agent.serve,
        service,
        domains=domains,
        lifetime=node_runs.Lifetime(
            unused_secs=arguments.remove_unused_after,
            limit_bytes=arguments.max_bytes,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
