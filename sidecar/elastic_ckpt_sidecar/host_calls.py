"""Calls of hosts (`core.calls`) that colocated Python carries, and answers to them.

The head sends calls and polls for the answers, because the methods of a process may be
carried out one after the other: a host that writes, copies or reads for seconds does so
in a thread, and the batches of the data are not held up.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from elastic_ckpt.core import allgather, background, calls, errors
from elastic_ckpt.data import compatibility
from elastic_ckpt_sidecar import failures, messages

# An answer is returned in chunks, because a method returns arrays of a fixed size.
CHUNK_BYTES = 16384
# Stands for the length of an answer that is not there yet.
UNDER_WAY = -1


class HostCalls:
    """What runs calls beside the accelerators; colocated classes extend it.

    Args:
      host_of: the number of the host of each CPU device, by its id.

    Attributes:
      hosts: those of this process, by number: one, but where a process stands for
        several.
    """

    def __init__(self, host_of: Mapping[int, int]) -> None:
        self._host_of = host_of
        self.hosts: dict[int, Any] = {}
        self._answers: dict[tuple[int, int], futures.Future[bytes]] = {}

    @failures.reported()
    def begin(self, call: jax.Array) -> jax.Array:
        """Begins a call, under its number; answers as `lengths`."""
        content = messages.decode(call)
        for number in self.asked(call):
            ask = functools.partial(self._answer, number, content["method"])
            self._answers[content["call"], number] = background.in_thread(
                ask, name="host-calls"
            )
        return self.lengths(call)

    @failures.reported()
    def lengths(self, call: jax.Array) -> jax.Array:
        """The bytes of each host's answer, or `UNDER_WAY`: int32 `[devices]`."""
        number = messages.decode(call)["call"]

        def length(device: jax.Device) -> np.ndarray:
            answer = self._answers[number, self._host_of[device.id]]
            return np.array(
                len(answer.result()) if answer.done() else UNDER_WAY, np.int32
            )

        return messages.reply(call, length)

    @failures.reported()
    def answers(self, call: jax.Array) -> jax.Array:
        """A chunk of each host's answer, padded: uint8 `[devices, CHUNK_BYTES]`."""
        content = messages.decode(call)
        start = content["start"]
        taken = {
            number: self._answers[content["call"], number].result()
            for number in self.asked(call)
        }
        if content["last"]:
            for number in taken:
                del self._answers[content["call"], number]

        def chunk(device: jax.Device) -> np.ndarray:
            answer = taken[self._host_of[device.id]]
            part = answer[start : start + CHUNK_BYTES].ljust(CHUNK_BYTES)
            return np.frombuffer(part, np.uint8)

        return messages.reply(call, chunk)

    def asked(self, call: jax.Array) -> list[int]:
        """The hosts of this process whose devices are those of the call, in order."""
        return sorted(
            {self._host_of[shard.device.id] for shard in call.addressable_shards}
        )

    def _answer(self, number: int, encoded: Any) -> bytes:
        def run() -> Any:
            call, arguments = calls.decode(encoded)
            return call.run(self.hosts[number], arguments)

        # The root of a thread: the head raises what fails.
        name = compatibility.host_name()
        return json.dumps({"host": name, **allgather.outcome(run)}).encode()


class Caller:
    """Calls hosts from the head.

    Args:
      agent: of a colocated class that extends `HostCalls`.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._numbers = itertools.count()

    def outcomes(
        self, call: calls.Call, arguments: Mapping[str, Any], sharding: NamedSharding
    ) -> list[dict[str, Any]]:
        """What hosts return, as `allgather.outcome` has it with the name of the host.

        Args:
          call: the call.
          arguments: by name.
          sharding: of a message; for each of its devices there is an outcome.

        Raises:
          RunError: if a host does not answer in time.
        """
        number = next(self._numbers)
        content = {"call": number, "method": call.encode(arguments)}
        until_secs = time.monotonic() + call.limit_secs
        lengths = self.run(self._agent.begin, content, sharding)
        pauses = messages.pauses()
        while (lengths == UNDER_WAY).any():
            if time.monotonic() > until_secs:
                raise errors.RunError(
                    f"hosts have not answered {call.name} for {call.limit_secs:g} s;"
                    " look at their logs, and start the run again"
                )
            next(pauses)
            lengths = self.run(self._agent.lengths, {"call": number}, sharding)
        chunks = []
        longest = int(lengths.max())
        for start in range(0, longest, CHUNK_BYTES):
            last = start + CHUNK_BYTES >= longest
            content = {"call": number, "start": start, "last": last}
            chunks.append(self.run(self._agent.answers, content, sharding))
        return [json.loads(row.tobytes()) for row in np.concatenate(chunks, axis=1)]

    def run(
        self, method: Any, content: Any, sharding: NamedSharding, *arrays: jax.Array
    ) -> np.ndarray:
        """What a method of the agent returns, a row for each device of a message."""
        with failures.reaching_the_head():
            return messages.rows(method(messages.encode(content, sharding), *arrays))
