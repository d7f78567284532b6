"""Messages of part tables between the hosts of a world, as bytes.

    8 bytes    the length of the header, little-endian
    header     JSON: steps, holders, files and problems
    columns    of each table, as they lie in memory, little-endian
    16 bytes   XXH3-128 of all that

They live as long as one exchange, between programs of one version. A message is
checked before any of it is used, as a manifest is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import boxes, checked_json, digest, storage
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.holdings import Tier
from elastic_ckpt.steps.manifest import (
    Contents,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.part_table import (
    HeldFile,
    Holder,
    PartTable,
    SavedStep,
    joined,
)
from elastic_ckpt.steps.step_id import StepId

_LENGTH_BYTES = 8
_DIGEST_BYTES = 16
_TIERS: dict[str, Tier] = {"local": "local", "persistent": "persistent"}
_NO_HOST = Host(id="none", number=0, domains={})
# Errors that other content raises when it is decoded.
_NOT_A_MESSAGE = (*manifest_file.NOT_A_MANIFEST, IndexError)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartMessage:
    """Parts of steps, and what could not be read.

    Attributes:
      tables: of the steps; in an answer, the senders' before those of other holders.
      problems: manifests and messages that could not be read, a sentence each.
      saves: steps with their saves that hosts have.
      refusing: the urls of agents that do not take the run's secret.
      is_partial: whether the message of a host could not be read.
    """

    tables: tuple[PartTable, ...] = ()
    problems: tuple[str, ...] = ()
    saves: tuple[StepId, ...] = ()
    refusing: tuple[str, ...] = ()
    is_partial: bool = False

    @classmethod
    def merged(cls, messages: Sequence[PartMessage]) -> PartMessage:
        """All that several messages contain."""
        return cls(
            tables=tuple(joined([each for m in messages for each in m.tables])),
            problems=tuple(each for m in messages for each in m.problems),
            saves=tuple(sorted({each for m in messages for each in m.saves})),
            refusing=tuple(each for m in messages for each in m.refusing),
            is_partial=any(m.is_partial for m in messages),
        )

    def of_save(self, step_id: StepId) -> PartTable | None:
        """The first table of a save of a step; None if there is none."""
        of_save = (each for each in self.tables if each.saved.step_id == step_id)
        return next(of_save, None)


def to_bytes(message: PartMessage) -> bytes:
    """Encodes a message."""
    header = storage.canonical_json(
        {
            "problems": list(message.problems),
            "saves": [list(each) for each in message.saves],
            "refusing": list(message.refusing),
            "is_partial": message.is_partial,
            "tables": [_to_json(table) for table in message.tables],
        }
    )
    pieces = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
    for table in message.tables:
        columns = _columns(len(table), table.saved.contents.rank)
        for name, (dtype, shape) in columns.items():
            column = np.ascontiguousarray(_column(table, name), dtype)
            assert column.shape == shape
            pieces.append(column.tobytes())
    content = b"".join(pieces)
    return content + digest.values_digest(np.frombuffer(content, np.uint8))


def parse(content: bytes) -> PartMessage:
    """The message that `to_bytes` encoded, checked.

    Raises:
      UnreadableError: if it is cut short, altered, or something else.
    """
    whole = np.frombuffer(content, np.uint8)
    body = whole[: max(0, len(whole) - _DIGEST_BYTES)]
    if digest.values_digest(body) != content[len(body) :]:
        raise checked_json.UnreadableError("was cut short or altered")
    try:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = json.loads(content[_LENGTH_BYTES:end])
        tables = []
        for fields in header["tables"]:
            table, end = _from_json(fields, body, end)
            tables.append(table)
        return PartMessage(
            tables=tuple(tables),
            problems=tuple(map(str, header["problems"])),
            saves=tuple(StepId(int(step), str(save)) for step, save in header["saves"]),
            refusing=tuple(map(str, header["refusing"])),
            is_partial=bool(header["is_partial"]),
        )
    except _NOT_A_MESSAGE as error:
        raise checked_json.UnreadableError(f"is not a message ({error!r})") from None


def _columns(num_rows: int, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        "holder": ("<i4", (num_rows,)),
        "target": ("<i4", (num_rows,)),
        "leaf": ("<i4", (num_rows,)),
        "start": ("<i8", (num_rows, rank)),
        "stop": ("<i8", (num_rows, rank)),
        "digest": ("<u8", (num_rows, 2)),
        "stored_bytes": ("<i8", (num_rows,)),
    }


def _column(table: PartTable, name: str) -> np.ndarray:
    return getattr(table.boxes if name in ("start", "stop") else table, name)


def _to_json(table: PartTable) -> dict[str, storage.Json]:
    run, (step, save), contents = table.saved
    nothing = Manifest(
        run=run,
        step=step,
        save=save,
        host=_NO_HOST,
        contents=contents,
        fragments=Fragments.from_rows([], contents=contents),
        component_files=(),
    )
    return {
        "manifest": manifest_file.to_bytes(nothing).decode(),
        "num_rows": len(table),
        "holders": [
            [each.host.id, each.host.number, dict(each.host.domains), *each[1:]]
            for each in table.holders
        ],
        "files": [
            [
                holder,
                target,
                file.component,
                list(file.parts),
                file.path,
                file.digest.hex(),
                file.stored_bytes,
            ]
            for holder, target, file in table.files
        ],
    }


def _from_json(
    fields: Mapping[str, Any], body: np.ndarray, begin: int
) -> tuple[PartTable, int]:
    # The table whose columns begin there, and where they end.
    nothing = manifest_file.parse(fields["manifest"].encode())
    contents = nothing.contents
    columns = {}
    for name, (dtype, shape) in _columns(fields["num_rows"], contents.rank).items():
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        columns[name] = np.frombuffer(body[begin:end], dtype).reshape(shape)
        begin = end
    start, stop = columns.pop("start"), columns.pop("stop")
    holders = tuple(
        Holder(_host(host_id, number, domains), str(url), _TIERS[tier])
        for host_id, number, domains, url, tier in fields["holders"]
    )
    table = PartTable(
        saved=SavedStep(nothing.run, nothing.step_id, contents),
        holders=holders,
        boxes=boxes.Boxes(start=start, stop=stop),
        files=_files(fields["files"], contents, len(holders)),
        **columns,
    )
    _check(table)
    return table, begin


def _check(table: PartTable) -> None:
    contents = table.saved.contents
    manifest_file.require(
        manifest_file.within(table.leaf, len(contents.leaves)),
        "the numbers of the leaves",
    )
    manifest_file.require(
        manifest_file.within(table.holder, len(table.holders)),
        "the numbers of the holders",
    )
    held = table.boxes
    bounds = contents.shapes[table.leaf]
    inside = (held.start >= 0) & (held.start <= held.stop) & (held.stop <= bounds)
    manifest_file.require(bool(inside.all()), "a box inside of its leaf")
    manifest_file.require(bool((table.stored_bytes >= 0).all()), "the sizes")


def _files(
    listed: Sequence[Any], contents: Contents, num_holders: int
) -> tuple[HeldFile, ...]:
    files = []
    for holder, target, component, (first, end), path, hexed, stored_bytes in listed:
        file = manifest_file.component_file(
            {
                "component": component,
                "parts": [first, end],
                "path": path,
                "digest": hexed,
                "stored_bytes": stored_bytes,
            },
            contents,
        )
        manifest_file.require(0 <= holder < num_holders, "the numbers of the holders")
        files.append(HeldFile(holder, int(target), file))
    return tuple(files)


def _host(host_id: str, number: int, domains: Mapping[str, str]) -> Host:
    manifest_file.require(manifest_file.is_host_id(host_id), "the host's id")
    return Host(id=host_id, number=int(number), domains=domains)
