"""Values of many hosts in one message, in which equal ones are listed once.

Most answers of hosts are the same: nothing, or that a stage is idle. A message then has
one value and a range of numbers, however many hosts there are.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable
from typing import Any

from elastic_ckpt.core import storage


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupedValues:
    """The values of some hosts, and the hosts that have none.

    Attributes:
      hosts: by the canonical JSON of a value, the numbers of the hosts that have it.
      missing: the hosts whose values have not arrived.
    """

    hosts: dict[str, list[int]]
    missing: tuple[int, ...] = ()

    @classmethod
    def of_host(cls, host: int, value: storage.Json) -> GroupedValues:
        """The value of one host."""
        return cls(hosts={storage.canonical_json(value).decode(): [host]})

    @classmethod
    def merged(cls, several: Iterable[GroupedValues]) -> GroupedValues:
        """The values of several messages."""
        hosts: dict[str, list[int]] = {}
        missing: list[int] = []
        for each in several:
            missing += each.missing
            for text, numbers in each.hosts.items():
                hosts.setdefault(text, []).extend(numbers)
        return cls(hosts=hosts, missing=tuple(missing))

    @classmethod
    def from_bytes(cls, message: bytes) -> GroupedValues:
        """Decodes what `to_bytes` returned."""
        content = json.loads(zlib.decompress(message))
        return cls(
            hosts={
                text: [n for first, end in ranges for n in range(first, end)]
                for text, ranges in content["hosts"].items()
            },
            missing=tuple(content["missing"]),
        )

    def to_bytes(self) -> bytes:
        """Encodes the values, compressed."""
        hosts = {text: _ranges(sorted(each)) for text, each in self.hosts.items()}
        content = {"hosts": hosts, "missing": list(self.missing)}
        return zlib.compress(storage.canonical_json(content), 1)

    def values(self, num_hosts: int) -> list[Any]:
        """The value of each host by number; equal ones are one object."""
        values: list[Any] = [None] * num_hosts
        for text, numbers in self.hosts.items():
            value = json.loads(text)
            for number in numbers:
                values[number] = value
        return values


def _ranges(numbers: list[int]) -> list[storage.Json]:
    # The first number of each run, and the one after its last.
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return list(ranges)
