"""Additions of settings to pods, and to the container in which our code runs.

Each module of a setting returns an `Addition`, a value, and `Pods.add` merges it into
the pods of either kind of JobSet. Mappings are merged, lists are appended, and of other
values the added one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Object: TypeAlias = dict[str, Any]
# A host runs the program; under Pathways the head does, and workers have the devices. A
# backup host has neither.
Role: TypeAlias = Literal["host", "head", "worker", "backup"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addition:
    """The additions of a setting to pods.

    Attributes:
      labels: of the pods.
      annotations: of the pods.
      spec: fields of the pods.
      container: fields of the container in which our code runs: the program, or the
        sidecar of a worker.
    """

    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    container: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods:
    """The pods of a replicated job.

    Attributes:
      role: what they do.
      job: the specification of their Job.
      template: of the pods; a part of `job`.
      container: the name of the container in which our code runs.
    """

    role: Role
    job: Object
    template: Object
    container: str

    def program(self) -> Object:
        """The container in which our code runs."""
        spec = self.template["spec"]
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        (container,) = (c for c in containers if c["name"] == self.container)
        return container

    def add(self, addition: Addition) -> None:
        """Merges `addition` into the template."""
        merge(self.program(), addition.container)
        for name, value in (
            ("labels", addition.labels),
            ("annotations", addition.annotations),
        ):
            if value:
                merge(self.template, {"metadata": {name: dict(value)}})
        merge(self.template["spec"], addition.spec)


def merge(target: Object, added: Mapping[str, Any]) -> None:
    """Merges `added` into `target`, which is changed."""
    for key, value in added.items():
        present = target.get(key)
        if key == "env" and present:
            # The later of two variables of one name counts.
            names = {variable["name"] for variable in value}
            present = [each for each in present if each["name"] not in names]
        if isinstance(present, dict):
            merge(present, value)
        elif isinstance(present, list):
            target[key] = [*present, *value]
        else:
            target[key] = value
