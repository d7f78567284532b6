"""The command line of the agent, as `elastic-ckpt agent` and as a module.

    python -m elastic_ckpt.tiers.peers.agent_command /dev/shm/run --interface 10.0.0.7

The secret is in a file, never on a command line: others on the machine could read it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastic_ckpt.core import errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the agent's arguments."""
    parser.add_argument("directory", help="the root of the RAM disk to serve")
    parser.add_argument(
        "--interface",
        default="127.0.0.1",
        help="the address to listen at, at which other machines reach this one",
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="without it, the system picks one"
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the run's secret; without it, DIRECTORY/secret",
    )
    parser.add_argument("--tls-certificate", help="a PEM file: encrypt")
    parser.add_argument("--tls-key", help="the certificate's private key, a PEM file")
    parser.add_argument(
        "--max-bytes-per-sec", type=float, help="to all clients together"
    )
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end with the program that holds the other end of the standard input",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the agent's address, and serves until a signal ends it."""
    from elastic_ckpt.tiers.peers import agent

    agent.run(
        agent.Service(
            root=arguments.directory,
            interface=arguments.interface,
            port=arguments.port,
            secret_file=arguments.secret_file,
            tls_certificate=arguments.tls_certificate,
            tls_key=arguments.tls_key,
            max_bytes_per_sec=arguments.max_bytes_per_sec,
        ),
        announce=lambda address: print(
            f"serving {arguments.directory} at {address.url}", flush=True
        ),
        until_stdin_closes=arguments.until_stdin_closes,
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent; returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description="Serve the RAM disk of a machine.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except errors.ElasticCkptError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 1


def _port(text: str) -> int:
    # Errors are argparse's.
    number = int(text)
    if number not in range(2**16):
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
