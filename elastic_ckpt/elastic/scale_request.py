"""Requests to change the number of slices: `scale.json` in the run directory.

`elastic-ckpt scale` writes the file, and the machine that leads the run reads it. A
request lasts until the next one or until the run is restarted.
"""

from __future__ import annotations

import dataclasses
import os
import time

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, storage
from elastic_ckpt.elastic.decision import Policy

FILE = "scale.json"
_VERSION = 1
# The time between checks of the file.
_LOOK_SECS = 2.0


def write(run_directory: epath.PathLike, slices: int) -> None:
    """Requests that the live run in a directory continue on `slices` slices."""
    content = checked_json.to_bytes({"slices": slices}, version=_VERSION)
    storage.write_atomic(os.path.join(run_directory, FILE), content)


def remove(run_directory: epath.PathLike) -> None:
    """Removes an earlier launch's request; called at each launch of a run."""
    storage.remove(storage.absolute(run_directory) / FILE)


class ScaledPolicy:
    """The policy of a run, limited to the number of slices that was last requested.

    The configured policy's bounds also limit requests.
    """

    def __init__(self, run_directory: epath.PathLike, policy: Policy) -> None:
        self._path = storage.absolute(run_directory) / FILE
        self._configured = self._policy = policy
        self._content = b""
        self._next_secs = 0.0

    def __call__(self) -> Policy:
        """The policy; a new object after each request."""
        if time.monotonic() < self._next_secs:
            return self._policy
        self._next_secs = time.monotonic() + _LOOK_SECS
        try:
            content = storage.read_bytes(self._path)
            if content != self._content:
                # Parsed only once, even if it is malformed.
                self._content = content
                request = checked_json.parse(content, what="request", version=_VERSION)
                slices, bounds = request["slices"], self._configured
                most = max(bounds.min_slices, min(slices, bounds.max_slices or slices))
                self._policy = dataclasses.replace(bounds, max_slices=most)
        except FileNotFoundError:
            pass
        except (checked_json.UnreadableError, *bucket_clients.failures()) as error:
            logging.warning(
                "%s cannot be read, so it is ignored: %s", self._path, error
            )
        return self._policy
