"""The memory of a plan's buffers: filled by copies, reduced, taken when complete."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Mapping

import numpy as np

from elastic_ckpt.core import host_memory
from elastic_ckpt.universal.plan.load_plan import LoadPlan
from elastic_ckpt.universal.plan.pieces import FilledPart
from elastic_ckpt.universal.plan.spans import Form
from elastic_ckpt.universal.reading import arithmetic, strided_copy


class BufferMemory:
    """The buffers of a plan; any number of threads may call it.

    Memory is allocated when a buffer is first used.

    Args:
      plan: of this host.
      allocate: makes the memory of a buffer, uint8, of a number of bytes.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        allocate: Callable[[int], np.ndarray] = host_memory.allocate,
    ) -> None:
        self._plan = plan
        self._allocate = allocate
        self._lock = threading.Lock()
        self._memory: dict[int, np.ndarray] = {}
        self._fills: dict[int, list[FilledPart]] = collections.defaultdict(list)
        self._left = [buffer.box.volume for buffer in plan.buffers]
        for fill in plan.fills:
            self._fills[fill.buffer].append(fill)
            self._left[fill.buffer] -= math.prod(
                part.stop - part.start for part in fill.place
            )
        self._region_of = {
            layer: number
            for number, region in enumerate(plan.regions)
            for layer in region.layers
        }
        self._layers_left = [len(region.layers) for region in plan.regions]
        layers = self._region_of.keys()
        # Buffers of targets that no copy fills.
        self.complete_at_once = [
            number
            for number, left in enumerate(self._left)
            if not left and number not in layers
        ]

    def bytes_of(self, number: int) -> np.ndarray:
        """The bytes of a buffer, whose elements are in row-major order."""
        with self._lock:
            memory = self._memory.get(number)
            if memory is None:
                memory = self._memory[number] = self._allocated(number)
            return memory

    def put(self, number: int, element: int, form: Form, values: np.ndarray) -> None:
        """Copies values, of the shape of a form, into a buffer."""
        memory = self.bytes_of(number)
        dtype = self._plan.buffers[number].dtype
        strides = [stride * dtype.itemsize for stride in form.buffer_strides]
        offset = element * dtype.itemsize
        into = np.ndarray(form.sizes, dtype, memory.data, offset, strides)
        values = arithmetic.viewed(values, form.view)
        values = arithmetic.scaled(values, form.scale, form.shift)
        name = self._plan.buffers[number].tensor.name
        arithmetic.check_cast(values, dtype, name)
        strided_copy.copy(into, values)

    def completed(self, volumes: Mapping[int, int]) -> tuple[list[int], int]:
        """Notes elements that were copied, and reduces regions that are complete.

        Args:
          volumes: the number of elements that were copied, by buffer.

        Returns:
          The buffers of targets that are complete, and the bytes of the layers that
          were freed.
        """
        complete, regions = self._note(volumes)
        freed = 0
        for number in regions:
            region = self._plan.regions[number]
            layers = [self._values(layer) for layer in region.layers]
            values = arithmetic.reduced(region, layers, self._plan.tensors)
            self.put(region.buffer, region.element, region.form, values)
            freed += sum(layer.nbytes for layer in layers)
            with self._lock:
                for layer in region.layers:
                    del self._memory[layer]
            complete += self._note({region.buffer: region.form.volume})[0]
        return complete, freed

    def take(self, number: int) -> np.ndarray:
        """The values of a complete buffer, which is then given up here."""
        values = self._values(number)
        with self._lock:
            del self._memory[number]
        return values

    def _values(self, number: int) -> np.ndarray:
        buffer = self._plan.buffers[number]
        return self.bytes_of(number).view(buffer.dtype).reshape(buffer.box.shape)

    def _note(self, volumes: Mapping[int, int]) -> tuple[list[int], list[int]]:
        # The buffers of targets and the regions that are complete.
        complete, regions = [], []
        with self._lock:
            for number, volume in volumes.items():
                self._left[number] -= volume
                if self._left[number]:
                    continue
                region = self._region_of.get(number)
                if region is None:
                    complete.append(number)
                    continue
                self._layers_left[region] -= 1
                if not self._layers_left[region]:
                    regions.append(region)
        return complete, regions

    def _allocated(self, number: int) -> np.ndarray:
        buffer = self._plan.buffers[number]
        num_bytes = buffer.box.volume * buffer.dtype.itemsize
        memory = self._allocate(num_bytes)
        values = memory.view(buffer.dtype).reshape(buffer.box.shape)
        for fill in self._fills.get(number, ()):
            values[fill.place] = fill.value
        return memory
