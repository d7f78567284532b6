"""Elastic runs: a new world of hosts whenever slices are lost or rejoin."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.elastic.cluster import Cluster
    from elastic_ckpt.elastic.decision import Policy, Work
    from elastic_ckpt.elastic.faults import Fault
    from elastic_ckpt.elastic.pathways import Pathways, SimulatedSlices
    from elastic_ckpt.elastic.processes import Processes
    from elastic_ckpt.elastic.runtime import run
    from elastic_ckpt.elastic.watch import Limits
    from elastic_ckpt.elastic.world import World

__all__ = [
    "Cluster",
    "Fault",
    "Limits",
    "Pathways",
    "Policy",
    "Processes",
    "SimulatedSlices",
    "Work",
    "World",
    "run",
]
