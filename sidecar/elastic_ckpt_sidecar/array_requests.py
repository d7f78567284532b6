"""Requests of a head that has no host's memory: arrays by layout, and files by copy."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from elastic_ckpt.host.endpoint import HostEndpoint
from elastic_ckpt.host.phases import PHASES, Phases, limits_secs
from elastic_ckpt.host.step_notes import OfStep
from elastic_ckpt_sidecar import component_files
from elastic_ckpt_sidecar.array_layout import GroupDescription
from elastic_ckpt_sidecar.colocated_tiers import ColocatedTiers

ColocatedHost = HostEndpoint[ColocatedTiers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeLayout:
    """Describes a layout, which other requests name by its number.

    Attributes:
      layout: its number.
      groups: of its leaves.
    """

    layout: int
    groups: tuple[GroupDescription, ...]

    def run(self, host: ColocatedHost) -> None:
        """See `HostArrays.describe`."""
        host.tiers.arrays.describe(self.layout, self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureArrays(OfStep):
    """Copies the arrays that a host holds; the answer is as of `Hosts.capture`.

    Attributes:
      layout: of the arrays.
    """

    layout: int

    def run(self, host: ColocatedHost) -> str:
        """See `HostArrays.capture`."""
        return host.tiers.arrays.capture(self.step, self.save, self.layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectArrays:
    """Selects what is read of the step that is open.

    Attributes:
      layout: of the leaves that are wanted.
      components: that are wanted besides.
    """

    layout: int
    components: tuple[str, ...]

    def run(self, host: ColocatedHost) -> None:
        """See `HostArrays.select`."""
        host.tiers.arrays.select(self.layout, self.components)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetDtypes:
    """Asks for the saved dtypes of leaves that are wanted in any dtype, by path."""

    def run(self, host: ColocatedHost) -> Mapping[str, str]:
        """See `HostArrays.dtypes`."""
        return host.tiers.arrays.dtypes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PutFiles(OfStep):
    """Writes files of components into a step that is being saved.

    Attributes:
      files: by path in the step, their content.
    """

    files: Mapping[str, bytes]

    def run(self, host: ColocatedHost) -> None:
        """See `component_files.write`."""
        directory = host.tiers.saver.directory(self.step, self.save)
        component_files.write(directory, self.files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetFiles:
    """Asks for the content of the files below a directory of a host, by path.

    Attributes:
      directory: on the host.
    """

    directory: str

    def run(self, host: ColocatedHost) -> Mapping[str, bytes]:
        """See `component_files.read`."""
        del host
        return component_files.read(self.directory)


COLOCATED_PHASES = Phases(PHASES.limits_secs | limits_secs(sys.modules[__name__]))
