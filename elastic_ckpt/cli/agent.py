"""`elastic-ckpt agent DIRECTORY`: serves the RAM disk of a machine to its peers."""

from elastic_ckpt.tiers.peers.agent_command import add_arguments, run

__all__ = ["add_arguments", "run"]
