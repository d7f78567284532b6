"""Global batches, read in this process or in colocated Python.

* One process, or one on each host: in that process (`data.Batches`).
* One controller of many hosts (Pathways): beside the hosts (`RemoteIterator`).
"""

from __future__ import annotations

from elastic_ckpt_sidecar import remote_iterator
from jax.sharding import Mesh, PartitionSpec

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import elastic_data, iterator, prefetch


def batches(
    data: elastic_data.ElasticData,
    *,
    mesh: Mesh,
    spec: PartitionSpec | None = None,
    global_batch_size: int,
    colocated: bool | None = None,
    read_ahead: prefetch.ReadAhead | int = prefetch.TWO_BATCHES,
) -> iterator.Batches | remote_iterator.RemoteIterator:
    """An iterator over the global batches of `data`, as arrays sharded over `mesh`.

    The batches, and their order, are the same on every mesh. Each host loads the rows
    that its devices hold; hosts that hold the same rows, such as those of one
    tensor-parallel group, each load them. The iterator is a checkpointable: save it
    with the model, and load it to continue with the next batch, on any number of hosts.

    Args:
      data: from `ec.data.from_config`, `positional` or `sharded`.
      mesh: the training mesh, with any axes.
      spec: the mesh axes that shard a batch: the first entry names those of the rows,
        the second, if there is one, those of dim 1 (the sequence) of features that have
        it; over all other axes a batch is replicated. `example_id` is sharded by rows
        alone. By default rows are sharded over the only axis of the mesh, or over its
        axes named batch, data, fsdp, replica and slice.
      global_batch_size: rows of a global batch, B; a multiple of the product of the
        sizes of the axes that shard rows.
      colocated: whether workers in colocated Python, beside the accelerators, read the
        data; by default they do if this process controls other hosts than its own.
      read_ahead: how far each host reads ahead of the loop: a number of batches, or
        `ec.data.ReadAhead`.

    Raises:
      ConfigError: if `data` is anything else, such as a Grain dataset, if `spec` does
        not fit the mesh, or if the rows do not divide over their axes. Whether other
        dims divide is seen, and raised, with the first batch.
    """
    elastic_data.check(data, caller="ec.batches")
    if not isinstance(mesh, Mesh):
        raise errors.ConfigError(
            f"ec.batches: mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh,"
            ' such as jax.make_mesh((jax.device_count(),), ("data",))'
        )
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise errors.ConfigError(
            f"ec.batches: spec={spec!r}; give a jax.sharding.PartitionSpec, such as"
            f" PartitionSpec({mesh.axis_names[0]!r})"
        )
    if colocated is None:
        colocated = topology.is_single_controller(mesh)
    make = remote_iterator.RemoteIterator if colocated else iterator.Batches
    return make(
        data,
        mesh=mesh,
        spec=spec,
        global_batch_size=elastic_data.batch_size(
            global_batch_size, caller="ec.batches"
        ),
        read_ahead=prefetch.ReadAhead.of(read_ahead),
    )


def configured_batches(
    data: elastic_data.ElasticData,
    section: schema.DataSection,
    *,
    mesh: Mesh,
    spec: PartitionSpec | None = None,
    global_batch_size: int,
) -> iterator.Batches | remote_iterator.RemoteIterator:
    """`batches`, read as a configuration selects."""
    return batches(
        data,
        mesh=mesh,
        spec=spec,
        global_batch_size=global_batch_size,
        # In this process it cannot run under a single controller.
        colocated=section.colocated_python_data_input or None,
        read_ahead=prefetch.ReadAhead(
            batches=section.data_read_ahead_batches,
            max_bytes=section.data_read_ahead_mib << 20,
        ),
    )
