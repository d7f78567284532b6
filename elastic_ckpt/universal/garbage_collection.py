"""Switches the collector of cycles off while many objects without cycles are made.

It would scan millions of tensors again and again, which doubles the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Switches it off; afterwards it is as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
