"""Replaces the clock, the threads and the files of the product while a block runs."""

import os
import time
from unittest import mock

from elastic_ckpt.core import background, clock, storage


class Clock:
    """The clock of the system, of which tests replace a part."""

    def time_ns(self):
        return time.time_ns()

    def monotonic(self):
        return time.monotonic()

    def sleep(self, secs):
        time.sleep(secs)


def by(virtual):
    """The product reads this clock."""
    named = {name: getattr(virtual, name) for name in ("time_ns", "monotonic", "sleep")}
    return mock.patch.multiple(clock, **named)


def made_by(threads):
    """All calls beside the caller are made by these threads."""
    return mock.patch.multiple(
        background, in_thread=threads.in_thread, pool=threads.pool, wait=threads.wait
    )


def watched(watch):
    """Calls `watch` before each change of a file; what it raises prevents the change.

    No code of the product catches a `BaseException` of its own.
    """
    return mock.patch.object(
        storage, "before", lambda change, path: watch(change, os.fspath(path))
    )
