"""`elastic-ckpt agent DIRECTORY`: serves the RAM disk of a machine to its peers."""

from __future__ import annotations

import argparse
import sys

from elastic_ckpt.tiers.peers import agent_command
from elastic_ckpt.tiers.peers.agent_command import add_arguments

__all__ = ["add_arguments", "run"]

# By name: the command line is parsed, and words are completed, without NumPy.
_REFILL = "elastic_ckpt.host.node_refill"


def run(arguments: argparse.Namespace) -> int:
    """Prints the agent's address, and serves until a signal ends it."""
    return agent_command.run(arguments, refill=(sys.executable, "-m", _REFILL))
