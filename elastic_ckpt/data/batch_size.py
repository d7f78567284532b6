"""How many rows a batch has, and whether a world can share them out."""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, topology


def global_batch_size(data: schema.DataSection, world: topology.Topology) -> int:
    """Rows of a global batch on `world`.

    Raises:
      ConfigError: if the batch does not divide over the hosts and devices.
    """
    rows = data.global_batch_size
    if not rows:
        exact = data.per_device_batch_size * world.devices
        rows = round(exact)
        if not rows or rows != exact:
            raise errors.ConfigError(
                f"per_device_batch_size={data.per_device_batch_size} on {world.devices}"
                f" devices is {exact:g} rows; choose it so that this is a whole number"
            )
    for what, count in (("hosts", world.hosts), ("devices", world.devices)):
        if rows % count:
            raise errors.ConfigError(
                f"a global batch of {rows} rows does not divide over {count} {what};"
                f" set global_batch_size to a multiple of {count}, or use a number of"
                f" {what} that divides {rows}"
            )
    return rows
