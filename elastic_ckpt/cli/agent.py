"""`elastic-ckpt agent DIRECTORY`: serves the RAM disk of a machine to its peers."""

from __future__ import annotations

import argparse

from elastic_ckpt.tiers.peers import agent_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    agent_command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, and prints its address."""
    return agent_command.run(arguments)
