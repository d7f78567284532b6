"""Where the data iterator runs: the same lines for every kind of job.

* One process, or one on each host: in that process (`data.Batches`).
* One controller of many hosts (Pathways): beside the hosts (`RemoteIterator`).
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt_sidecar import remote_iterator
from jax.sharding import Mesh

from elastic_ckpt.config import schema
from elastic_ckpt.core import topology
from elastic_ckpt.data import elastic_data, iterator, prefetch


def batches(
    data: elastic_data.ElasticData,
    *,
    mesh: Mesh,
    global_batch_size: int,
    colocated: bool | None = None,
    **more: Any,
) -> iterator.Batches | remote_iterator.RemoteIterator:
    """The global batches of `data` on `mesh`, from wherever the rows are best read.

    Args:
      data: what to iterate over.
      mesh: the training mesh; rows are sharded over all of its axes.
      global_batch_size: rows of a global batch, B.
      colocated: whether workers in colocated Python read; by default if this process
        controls hosts other than its own.
      **more: `read_ahead`, of either.
    """
    if colocated is None:
        colocated = topology.is_single_controller(mesh)
    make = remote_iterator.RemoteIterator if colocated else iterator.Batches
    return make(data, mesh=mesh, global_batch_size=global_batch_size, **more)


def configured_batches(
    data: elastic_data.ElasticData,
    section: schema.DataSection,
    *,
    mesh: Mesh,
    global_batch_size: int,
) -> iterator.Batches | remote_iterator.RemoteIterator:
    """`batches`, where and as far ahead as a configuration says."""
    return batches(
        data,
        mesh=mesh,
        global_batch_size=global_batch_size,
        # In this process it cannot run under a single controller.
        colocated=section.colocated_python_data_input or None,
        read_ahead=prefetch.ReadAhead(
            batches=section.data_read_ahead_batches,
            max_bytes=section.data_read_ahead_mib << 20,
        ),
    )
