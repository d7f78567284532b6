"""The fields that `--json` of each verb prints: derived from the dataclasses it prints.

Programs read them: a page of the site lists them, a golden file in the tests freezes
them, and the tests compare what verbs print with them. What a verb adds to its
dataclasses stands here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from elastic_ckpt.cli import convert, plan
from elastic_ckpt.core import storage
from elastic_ckpt.inspect import (
    status,
    survey,
    verification,
)
from elastic_ckpt.simulation import simulated_cluster
from elastic_ckpt.training import audit, provenance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed:
    """What `audit` adds.

    Attributes:
      passed: whether the run passed; the exit code is 1 if it did not.
    """

    passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlooks:
    """What `plan` prints.

    Attributes:
      num_shards: number of logical shards.
      outlooks: of every combination of hosts and batch.
    """

    num_shards: int
    outlooks: tuple[plan.Outlook, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What `simulate` adds to each outcome.

    Attributes:
      setting: `as configured`, or what is changed.
    """

    setting: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspected(survey.Survey):
    """What `inspect` adds to a survey.

    Attributes:
      run: the identity of the run whose steps these are; empty for those of Orbax.
    """

    run: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """What `verify` prints.

    Attributes:
      run: the identity of the run.
      passed: whether all is well; the exit code is 1 if it is not.
      steps: that were read.
      problems: that were found.
    """

    run: str
    passed: bool
    steps: tuple[verification.VerifiedStep, ...]
    problems: tuple[verification.Problem, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What `convert` prints.

    Attributes:
      path: DST.
      format: of DST.
      tensors: that were written.
      num_bytes: of their values.
      secs: that it took.
    """

    path: str
    format: str
    tensors: int
    num_bytes: int
    secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """What `convert --dry-run` prints.

    Attributes:
      format: of the source, for people.
      sources: stored tensors.
      targets: tensors that are made.
      num_bytes: of their values.
      rules: in the order of the layout.
      fills: boxes that no source has.
      filled_bytes: of their values.
      unverified: files for which the format has no checksum.
    """

    format: str
    sources: int
    targets: int
    num_bytes: int
    rules: Sequence[convert.RuleUse]
    fills: int
    filled_bytes: int
    unverified: Sequence[str]


# By the call. An object has the fields of all dataclasses of a call, and those with a
# default may be absent; `LISTS` print a list of objects.
OUTPUTS: dict[str, tuple[type, ...]] = {
    "audit": (audit.Audit, Passed),
    "audit --find": (provenance.Found,),
    "audit --step": (provenance.UsedBatch,),
    "plan": (Outlooks,),
    "simulate": (Setting, simulated_cluster.Outcome),
    "status": (status.Status,),
    "inspect": (Inspected,),
    "verify": (Verified,),
    "convert": (Converted,),
    "convert --dry-run": (Planned,),
}
LISTS = ("audit --find", "audit --step", "simulate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a verb's JSON.

    Attributes:
      path: such as `tiers[].step`; `*` stands for any name.
      type: such as `int | null`.
      meaning: in the words of its dataclass.
    """

    path: str
    type: str
    meaning: str


def fields(call: str) -> list[Field]:
    """All fields that a call of `OUTPUTS` prints."""
    prefix = "[]." if call in LISTS else ""
    return [each for cls in OUTPUTS[call] for each in _fields_of(cls, prefix)]


def _fields_of(cls: type, prefix: str) -> Iterator[Field]:
    hints, meanings = typing.get_type_hints(cls), _meanings(cls)
    for field in dataclasses.fields(cls):
        ending, name, nested = _described(hints[field.name])
        path = f"{prefix}{field.name}{ending}"
        yield Field(path=path, type=name, meaning=meanings.get(field.name, ""))
        # Kinds of an object may share fields.
        inner: dict[str, Field] = {}
        for kind in nested:
            for each in _fields_of(kind, f"{path}."):
                inner.setdefault(each.path, each)
        yield from inner.values()


def _described(annotation: Any) -> tuple[str, str, list[type]]:
    # What the annotation adds to the path, the type there, and dataclasses below it.
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, storage.Json):
        return "", "any JSON", []
    if annotation is types.NoneType:
        return "", "null", []
    if dataclasses.is_dataclass(annotation):
        return "", "object", [annotation]
    if origin is Literal:
        return "", " | ".join(f'"{each}"' for each in arguments), []
    if origin in (typing.Union, types.UnionType):
        parts = [_described(each) for each in arguments]
        (ending,) = {ending for ending, name, _ in parts if name != "null"}
        names = dict.fromkeys(name for _, name, _ in parts)
        return ending, " | ".join(names), [cls for part in parts for cls in part[2]]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return "", f"[{', '.join(_described(each)[1] for each in arguments)}]", []
    if origin in (tuple, Sequence):
        ending, name, nested = _described(arguments[0])
        return f"[]{ending}", name, nested
    if origin in (dict, Mapping):
        ending, name, nested = _described(arguments[1])
        return f".*{ending}", name, nested
    return "", annotation.__name__, []


def _meanings(cls: type) -> dict[str, str]:
    # Of the `Attributes:` of the class and of those that it inherits from.
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for name, meaning in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.M):
            found[name] = " ".join(meaning.split())
    return found
