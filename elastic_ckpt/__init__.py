"""Elastic data and checkpoints for JAX: a run continues on whatever hosts it has."""

from etils import epy

from elastic_ckpt.core.errors import ElasticCkptError

with epy.lazy_api_imports(globals()):
    from elastic_ckpt import components, data, elastic, universal
    from elastic_ckpt.checkpoint.follow import Step, record_metrics, watch_steps
    from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
    from elastic_ckpt.checkpoint.response import Response, SaveResponse
    from elastic_ckpt.frontend import Checkpointer, batches
    from elastic_ckpt.integrations import orbax_v0
    from elastic_ckpt.steps.retention import BestN, best_step
    from elastic_ckpt.tiers.choices import Local, Peers, Persistent, Tier, TlsFiles
    from elastic_ckpt.tiers.persistent.leases import lease
    from elastic_ckpt.tiers.preserved import pin, unpin
    from elastic_ckpt.training.load import load as load_config
    from elastic_ckpt.training.own_loop import RunDirectory

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
    "Step",
    "Tier",
    "TlsFiles",
    "__version__",
    "batches",
    "best_step",
    "components",
    "data",
    "elastic",
    "lease",
    "load_config",
    "orbax_v0",
    "pin",
    "record_metrics",
    "universal",
    "unpin",
    "watch_steps",
]
