"""Parses the named datasets and weights of a configuration.

They are either a list, `a*.parquet,0.3;b*.parquet,0.7`, or a JSON file in MaxText's
form, `{"web": {"path": "web/*.parquet", "weight": 0.3}, ...}`. In the file, an entry
may have `datasets` instead of `path`: a nested mixture, whose datasets are named like
`code/python` and share the entry's weight.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import mixing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset of a mixture, or the only one.

    Attributes:
      name: the dataset's name in cursors and reports.
      patterns: the files, as comma-separated paths, URIs or glob patterns.
      weight: the dataset's weight; only ratios of weights matter.
    """

    name: str
    patterns: str
    weight: float


def from_list(text: str, *, key: str) -> list[Dataset]:
    """Parses `patterns,weight;patterns,weight`, or patterns without a weight.

    A dataset's name is the end of its first pattern, from the last component without a
    wildcard on, so the name stays the same when the files move. If the name is taken,
    preceding components are included, so appending a dataset does not rename earlier
    ones. A single dataset needs no weight.

    Raises:
      ConfigError: if an entry lacks a weight. The message names `key` and the entry.
    """
    entries = [each.strip() for each in text.split(";") if each.strip()] or [""]
    datasets = []
    for entry, name in zip(entries, _names(entries), strict=True):
        patterns, comma, last = entry.rpartition(",")
        try:
            weight = float(last if comma else "")
        except ValueError:
            if len(entries) > 1:
                raise errors.ConfigError(
                    f"{key}: {entry} has no weight; use the form"
                    " patterns,weight;patterns,weight"
                ) from None
            patterns, weight = entry, 1.0
        datasets.append(Dataset(name=name, patterns=patterns, weight=weight))
    mixing.check_weights({d.name: d.weight for d in datasets})
    return datasets


def from_file(path: epath.PathLike) -> list[Dataset]:
    """Reads the datasets of a JSON file.

    Raises:
      ConfigError: if the file is invalid. The message names the file, the entry and the
        problem.
    """
    try:
        content = json.loads(
            storage.absolute(path).read_text(), object_pairs_hook=_object
        )
    except (OSError, ValueError) as error:
        raise errors.ConfigError(
            f"{path}: this mixture file cannot be read as JSON ({error}); check the"
            " file's path and contents"
        ) from None
    found = list(_entries(content, place=os.fspath(path), prefix="", share=1.0))
    names = [dataset.name for dataset in found]
    if len({*names}) < len(names):
        raise errors.ConfigError(
            f"{path}: two of the datasets {names} have the same name; rename one"
        )
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a name occurs twice in {[name for name, _ in pairs]}")
    return fields


def to_list(datasets: list[Dataset]) -> str:
    """The inverse of `from_list`."""
    if [dataset.weight for dataset in datasets] == [1.0]:
        return datasets[0].patterns
    return ";".join(f"{d.patterns},{d.weight}" for d in datasets)


def _entries(
    content: Any, *, place: str, prefix: str, share: float
) -> Iterator[Dataset]:
    if not isinstance(content, dict) or not content:
        raise errors.ConfigError(
            f'{place}: {prefix or "the file"} must have the form {{"name": {{"path":'
            ' "files*", "weight": 0.5}, ...}'
        )
    weights = {}
    for name, entry in content.items():
        fields = entry if isinstance(entry, dict) else {}
        weight, files = fields.get("weight"), {*fields} - {"weight"}
        if not isinstance(weight, int | float) or files not in ({"path"}, {"datasets"}):
            raise errors.ConfigError(
                f"{place}: the entry {prefix}{name} is {entry!r:.200}; set its weight"
                " to a number, and set either path or datasets"
            )
        weights[prefix + name] = weight
    mixing.check_weights(weights)
    total = sum(weights.values())
    for name, entry in content.items():
        weight = share * entry["weight"] / total
        if "path" in entry:
            yield Dataset(name=prefix + name, patterns=entry["path"], weight=weight)
        else:
            yield from _entries(
                entry["datasets"], place=place, prefix=f"{prefix}{name}/", share=weight
            )


def _names(entries: list[str]) -> list[str]:
    names: list[str] = []
    for entry in entries:
        path = entry.split(",")[0].strip().split("/")
        literal = [n for n, name in enumerate(path) if not glob.has_magic(name)]
        first = max(literal, default=0)
        ends = ("/".join(path[begin:]) for begin in range(first, -1, -1))
        name = next((end for end in ends if end not in names), None)
        if name is None:
            raise errors.ConfigError(
                f"mixture: {'; '.join(entries)} lists the same files twice; list them"
                " once, with one weight"
            )
        names.append(name)
    return names
