"""Calls to hosts (`core.calls`) and their answers, through colocated Python.

A process may run only one method at a time. Writing, copying and reading take seconds
and must not delay batches, so a host does them in a thread, and the head polls for the
answer.
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

# Answers come in chunks, because a method returns arrays of a fixed size.
CHUNK_BYTES = 16384
# The reported length of an answer that is not ready.
UNDER_WAY = -1


class HostCalls:
    """Runs calls on the accelerator hosts; colocated classes extend it.

    Args:
      host_of: a dict from CPU device ID to host index.

    Attributes:
      hosts: the hosts of this process, by index; normally one.
    """

    def __init__(self, host_of: Mapping[int, int]) -> None:
        self._host_of = host_of
        self.hosts: dict[int, Any] = {}
        self._answers: dict[tuple[int, int], futures.Future[bytes]] = {}

    @failures.reported()
    def begin(self, call: jax.Array) -> jax.Array:
        """Starts a call under its number; returns the same value as `lengths`."""
        content = messages.decode(call)
        for number in self.asked(call):
            ask = functools.partial(self._answer, number, content["method"])
            self._answers[content["call"], number] = background.in_thread(
                ask, name="host-calls"
            )
        return self.lengths(call)

    @failures.reported()
    def lengths(self, call: jax.Array) -> jax.Array:
        """The length of each host's answer, or `UNDER_WAY`: int32 `[devices]`."""
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
        """The indexes of this process's hosts that a call addresses, in order."""
        return sorted(
            {self._host_of[shard.device.id] for shard in call.addressable_shards}
        )

    def _answer(self, number: int, encoded: Any) -> bytes:
        def run() -> Any:
            call, arguments = calls.decode(encoded)
            return call.run(self.hosts[number], arguments)

        # Runs at the top of a thread, whose errors the head raises.
        name = compatibility.host_name()
        return json.dumps({"host": name, **allgather.outcome(run)}).encode()


class Caller:
    """Calls hosts from the head.

    Args:
      agent: an object of a colocated class that extends `HostCalls`.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._numbers = itertools.count()

    def outcomes(
        self, call: calls.Call, arguments: Mapping[str, Any], sharding: NamedSharding
    ) -> list[dict[str, Any]]:
        """Runs a call on hosts; returns each `allgather.outcome` with the host name.

        There is one outcome for each device of `sharding`.

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
                    f"the hosts did not answer the call {call.name} within"
                    f" {call.limit_secs:g} s; check their logs, and restart the run"
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
        """Runs an agent method; returns a row for each device of the message."""
        with failures.reaching_the_head():
            return messages.rows(method(messages.encode(content, sharding), *arrays))
