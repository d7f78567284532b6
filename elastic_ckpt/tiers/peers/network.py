"""The network of a host: the agent that serves its RAM disk, and a client of others."""

from __future__ import annotations

from elastic_ckpt.tiers.choices import Peers
from elastic_ckpt.tiers.peers import agent, agent_process, peer_client


class Network:
    """Agents in processes of their own, over HTTP; simulations have another."""

    def serve(self, service: agent.Service) -> agent_process.AgentProcess:
        """Has the RAM disk of this machine served; see `AgentProcess`."""
        return agent_process.AgentProcess(service)

    def client(self, peers: Peers, secret: str) -> peer_client.PeerClient:
        """A client of the agents of other machines.

        Args:
          peers: how they are reached.
          secret: of the run.
        """
        return peer_client.PeerClient(
            secret,
            tls_ca=None if peers.tls is None else peers.tls.authority,
            timeout_secs=peers.timeout_secs,
            max_bytes_per_sec=peers.max_bytes_per_sec,
        )
