"""Figures, with functions that print and write them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_PACKAGES = (
    *("elastic-ckpt", "jax", "jaxlib", "grain", "orbax-checkpoint", "array-record"),
    *("tensorstore", "numpy", "pyarrow"),
    # Libraries that a suite is compared with; printed if they are installed.
    *("maxtext", "mosaicml-streaming", "litdata", "lancedb", "datasets", "torchdata"),
    "torch",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure: the median of `samples`."""

    unit: str
    against: str  # a bound, or the other side of a ratio
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)


def figure(unit: str, against: str, samples: Iterable[float]) -> Figure:
    """The figure for some samples."""
    return Figure(unit=unit, against=against, samples=tuple(samples))


def ratio(above: Iterable[float], below: Iterable[float], against: str) -> Figure:
    """The figure for the ratios of samples, pair by pair."""
    return figure("ratio", against, (a / b for a, b in zip(above, below, strict=True)))


def merged(runs: Sequence[dict[str, Figure]]) -> dict[str, Figure]:
    """The figures of all runs of a suite, each with the samples of all runs."""
    return {
        name: dataclasses.replace(
            first, samples=tuple(s for run in runs for s in run[name].samples)
        )
        for name, first in runs[0].items()
    }


def table(figures: dict[str, Figure]) -> str:
    """The figures as a human-readable table, with the machine and the versions."""
    lines = [f"{'figure':<34} {'median':>9} {'least':>9} {'most':>9}  unit, against"]
    for name, figure in figures.items():
        numbers = (figure.value, min(figure.samples), max(figure.samples))
        cells = " ".join(f"{number:9.3f}" for number in numbers)
        lines.append(f"{name:<34} {cells}  {figure.unit}, {figure.against}")
    machine = ", ".join(f"{key} {value}" for key, value in _machine().items())
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    return "\n".join([*lines, machine, versions])


def write(path: str, figures: dict[str, Figure]) -> None:
    """Writes the figures to `path` as JSON."""
    content = {
        "machine": _machine(),
        "versions": _versions(),
        "figures": {
            name: {"value": figure.value, **dataclasses.asdict(figure)}
            for name, figure in figures.items()
        },
    }
    pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _machine() -> dict[str, str]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        **_ACCELERATORS,
    }


def runs_on(devices: Sequence[jax.Device]) -> None:
    """Records the accelerators on which the suite runs."""
    _ACCELERATORS["accelerators"] = f"{len(devices)} {devices[0].device_kind}"


_ACCELERATORS: dict[str, str] = {}


def _cpu() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
