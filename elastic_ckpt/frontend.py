"""`ec.Checkpointer` and `ec.batches`: the same calls with one controller or many.

* One process, or one on each host: each process reads its own rows (`data.Batches`) and
  saves its own memory (`checkpoint.hosts.InEveryProcess`).
* One controller of many hosts (Pathways): workers and agents in colocated Python, on
  the accelerator hosts, do both (`elastic_ckpt_sidecar`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from elastic_ckpt_sidecar import remote_hosts, remote_iterator
from jax.sharding import Mesh, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import checkpointer, hosts
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.core import allgather, calls, errors, events, topology
from elastic_ckpt.data import elastic_data, iterator, prefetch
from elastic_ckpt.tiers.choices import Chosen, Tier
from elastic_ckpt.tiers.persistent import run_files
from elastic_ckpt.universal import loading


def batches(
    data: elastic_data.ElasticData,
    *,
    mesh: Mesh,
    spec: PartitionSpec | None = None,
    global_batch_size: int,
    colocated: bool | None = None,
    read_ahead: prefetch.ReadAhead | int = prefetch.TWO_BATCHES,
) -> iterator.Batches:
    """Iterates over the global batches of `data`, as arrays sharded over `mesh`.

    The batches and their order are the same on every mesh. Each host loads the rows
    that its devices hold; if multiple hosts hold the same rows, as in a tensor-parallel
    group, each of them loads these rows. The iterator is a checkpointable: save it with
    the model, and load it to continue with the next batch on any number of hosts.

    Args:
      data: the result of `ec.data.from_config`, `positional` or `sharded`.
      mesh: the training mesh, with any axes.
      spec: the mesh axes that shard a batch: the first entry shards rows, and an
        optional second entry shards dim 1 (the sequence) of features that have it. A
        batch is replicated over all other axes. `example_id` is sharded by rows only.
        By default, rows are sharded over the only axis of the mesh, or over its axes
        named batch, data, fsdp, replica and slice.
      global_batch_size: the number of rows in a global batch, B; a multiple of the
        product of the sizes of the axes that shard rows. A stage of the data may
        override it.
      colocated: whether workers in colocated Python, on the accelerator hosts, read the
        data; by default, they do if this process controls other hosts.
      read_ahead: how far each host reads ahead of the loop: a number of batches, or
        `ec.data.ReadAhead`.

    Raises:
      ConfigError: if `data` is anything else, such as a Grain dataset, if `spec` does
        not match the mesh, or if the rows cannot be split evenly over their axes. Other
        dims are checked with the first batch.
    """
    elastic_data.check(data, caller="ec.batches")
    if not isinstance(mesh, Mesh):
        raise errors.ConfigError(
            f"ec.batches: mesh is of type {type(mesh).__name__}; pass a"
            ' jax.sharding.Mesh such as jax.make_mesh((jax.device_count(),), ("data",))'
        )
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise errors.ConfigError(
            f"ec.batches: spec={spec!r}; pass a jax.sharding.PartitionSpec, such as"
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


class Checkpointer(checkpointer.HostsCheckpointer):
    """A checkpointer with the methods of Orbax's `training.Checkpointer`.

    A step is saved to every tier in which it is due and restored from the nearest tier
    that has it. Every process of the run must create a checkpointer with the same
    arguments and make the same calls. Only settings of a machine may differ: where and
    how much RAM `Local` uses, and addresses, domains, files and rates of `Peers`.

        tiers = [
            ec.Local("/dev/shm/my_run", every=10),
            ec.Persistent("gs://bucket/my_run/steps", every=1000),
        ]
        with ec.Checkpointer(tiers) as checkpointer:
            if checkpointer.latest is not None:
                state = checkpointer.load_checkpointables(
                    None, {"state": abstract_state, "data": batches}
                )["state"]
            ...
            checkpointer.save_checkpointables_async(
                step, {"state": state, "data": batches}
            )
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        mesh: Mesh | None = None,
        run: str | None = None,
        slice_name: str | None = None,
        world: RunWorld = ALONE,
        emit: events.Emit = events.nobody,
        context: ocp.Context | None = None,
        read_only: bool = False,
    ) -> None:
        """Opens the steps in the tiers.

        Args:
          tiers: at most one each of `Local`, `Peers` and `Persistent`; `Peers` requires
            `Local`. Under a single controller, the directories are on the hosts, and
            `Peers.interface` is the controller's address in the hosts' network, by
            default the local address of its default route.
          mesh: the training mesh; needed only if it does not cover all devices.
          run: the run name; by default the run of the steps in the tiers or, if there
            are none, the directory name of `Local` or `Persistent`. Pass it if that
            name differs between hosts.
          slice_name: the slice of this process's devices; by default, the slice that
            the hardware reports. A single controller takes the slices from its mesh.
          world: the checkpointer's place in an elastic run, which
            `ec.elastic.World.checkpointer` fills in.
          emit: a function that receives each event.
          context: Orbax's context for all calls outside a `with` block of another
            context.
          read_only: whether to only read the steps in storage and in this machine's
            RAM, which another process may be writing. Saving is then an error.

        Raises:
          ConfigError: if the tiers are incompatible, or if the tiers, the run name or
            the versions differ between hosts.
          RunError: if a host cannot be reached, if the RAM disk is in use or stores
            steps of a different run, or if another run is writing to the same storage.
        """
        chosen = Chosen.from_choices(tiers, read_only=read_only)
        mesh = mesh or Mesh(np.array(jax.devices()), ("device",))
        messages = allgather.new()
        # Any host may have the steps in RAM. Storage may change while the processes
        # start, so host 0 alone looks there.
        names = messages.agreed(
            "run",
            lambda: run_files.find_run(chosen, in_storage=messages.host == 0),
            timeout_secs=calls.BRIEF_SECS,
        )
        found = next(filter(None, names), None)
        run = run or found or chosen.run
        chosen = chosen.for_reading() if read_only else chosen
        if topology.is_single_controller(mesh):
            members: hosts.Hosts = remote_hosts.over(mesh, chosen, run=run)
        else:
            config = HostConfig(
                run=run,
                number=topology.this_host(),
                slice_name=slice_name or topology.slice_of_this_host(),
                directory=chosen.ram_directory(),
                chosen=chosen,
            )
            members = hosts.InEveryProcess(HostEndpoint(config), messages)
        super().__init__(
            members,
            chosen,
            run=run,
            found=found,
            relayout=loading.relayout,
            world=world,
            emit=emit,
            context=context,
        )
