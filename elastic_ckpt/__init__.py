"""Elastic data and checkpoints for JAX: a run continues on whatever hosts are there."""

from etils import epy

from elastic_ckpt.core.errors import ElasticCkptError

with epy.lazy_api_imports(globals()):
    from elastic_ckpt import components, data, elastic, universal
    from elastic_ckpt.application.own_loop import RunDirectory
    from elastic_ckpt.checkpoint.response import Response, SaveResponse
    from elastic_ckpt.frontend.batches import batches
    from elastic_ckpt.frontend.checkpointer import Checkpointer
    from elastic_ckpt.host.answers import CheckpointMetadata
    from elastic_ckpt.integrations import orbax_v0
    from elastic_ckpt.manifests.best_steps import BestN, best_step
    from elastic_ckpt.tiers.choices import Local, Peers, Persistent, TlsFiles
    from elastic_ckpt.tiers.persistent.follow import follow, record_metrics
    from elastic_ckpt.tiers.persistent.leases import leased
    from elastic_ckpt.tiers.preserved import preserve, release

__version__ = "0.1.0"
__all__ = [
    "BestN",
    "CheckpointMetadata",
    "Checkpointer",
    "ElasticCkptError",
    "Local",
    "Peers",
    "Persistent",
    "Response",
    "RunDirectory",
    "SaveResponse",
    "TlsFiles",
    "__version__",
    "batches",
    "best_step",
    "components",
    "data",
    "elastic",
    "follow",
    "leased",
    "orbax_v0",
    "preserve",
    "record_metrics",
    "release",
    "universal",
]
