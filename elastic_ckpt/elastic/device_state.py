"""The state of a run in device memory, from one world to the next.

A single controller keeps its arrays when a world ends as planned: nothing is read from
a tier, and what stays on a device is not moved.
"""

from __future__ import annotations

import time
from typing import Any

import jax
from absl import logging

from elastic_ckpt.core import events


class DeviceState:
    """The state that a world has handed over, until another world takes it.

    Args:
      emit: called when a state is taken.
    """

    def __init__(self, emit: events.Emit = events.nobody) -> None:
        self._emit = emit
        self._step = -1
        self._leaves: list[jax.Array] = []
        self._structure: Any = None

    def put(self, step: int, state: Any) -> None:
        """Keeps the state after `step` steps, a pytree of arrays."""
        self._step = step
        self._leaves, self._structure = jax.tree.flatten(state)

    def clear(self) -> None:
        """Releases the arrays."""
        self._step, self._leaves, self._structure = -1, [], None

    def take(self, step: int, abstract_state: Any) -> Any:
        """The state under other shardings, if it can be read; it is kept no longer.

        Args:
          step: the steps that are done.
          abstract_state: the pytree of shapes, dtypes and shardings.

        Returns:
          None if there is no such state.
        """
        began_secs = time.monotonic()
        wanted, structure = jax.tree.flatten(abstract_state)
        is_same = (self._step, self._structure) == (step, structure)
        leaves = self._leaves if is_same else []
        self.clear()
        # The last first: each leaf is released when it was moved.
        leaves.reverse()
        moved = []
        try:
            for each in wanted if is_same else ():
                leaf = leaves.pop()
                if (leaf.shape, leaf.dtype) != (each.shape, each.dtype):
                    return None
                moved.append(jax.device_put(leaf, each.sharding))
            jax.block_until_ready(moved)
        except jax.errors.JaxRuntimeError as error:
            logging.warning("step %d cannot be read from the devices: %s", step, error)
            return None
        if not is_same:
            return None
        num_bytes = sum(leaf.nbytes for leaf in moved)
        secs = time.monotonic() - began_secs
        self._emit("state_kept", step=step, device_bytes=num_bytes, secs=secs)
        return jax.tree.unflatten(structure, moved)
