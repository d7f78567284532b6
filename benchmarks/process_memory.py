"""The resident memory of this process, as Linux counts it."""

from __future__ import annotations

import pathlib


def resident_bytes(kind: str) -> int:
    """Bytes of this process that Linux calls `VmRSS`, or `VmHWM`, the most so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(kind)


def reset_peak() -> None:
    """Resets `VmHWM`, the peak of this process's memory."""
    # If the system refuses, the peak is that of the whole process.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
