"""Requests for another number of slices: `scale.json` in the directory of a run.

`elastic-ckpt scale` writes the file, and the supervisor of the run looks at it. The
directory is shared by all machines, so the request reaches the run from any of them.
It lasts until the next request, in all worlds of this start: the file of an earlier
start is removed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, storage
from elastic_ckpt.elastic.decision import Policy

FILE = "scale.json"
_VERSION = 1
# Between two looks at the file; a bucket takes longer to answer.
_LOOK_SECS = 0.5
_BUCKET_LOOK_SECS = 5.0


def write(run_directory: epath.PathLike, slices: int) -> None:
    """Requests a number of slices of the run that is alive in a directory."""
    fields: dict[str, Any] = {"slices": slices, "time_ns": time.time_ns()}
    content = checked_json.to_bytes(fields, version=_VERSION)
    storage.write_atomic(os.path.join(run_directory, FILE), content)


class ScaledPolicy:
    """Returns the present policy of a run: that of its configuration, or as requested.

    Args:
      run_directory: of the run, which the caller has locked.
      policy: as configured.
    """

    def __init__(self, run_directory: epath.PathLike, policy: Policy) -> None:
        self._path = storage.absolute(run_directory) / FILE
        self._configured = self._policy = policy
        self._content = b""
        is_local = storage.is_local(self._path)
        self._between_secs = _LOOK_SECS if is_local else _BUCKET_LOOK_SECS
        self._next_secs = 0.0
        storage.remove(self._path)

    def __call__(self) -> Policy:
        """The policy, which is another object after each request."""
        now_secs = time.monotonic()
        if now_secs >= self._next_secs:
            self._next_secs = now_secs + self._between_secs
            self._look()
        return self._policy

    def _look(self) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except bucket_clients.failures() as error:
            logging.warning("%s cannot be read now: %s", self._path, error)
            return
        if content == self._content:
            return
        self._content = content
        try:
            fields = checked_json.parse(
                content, what="request for slices", version=_VERSION
            )
        except checked_json.UnreadableError as error:
            logging.warning(
                "%s %s; it is ignored: request again with `elastic-ckpt scale`",
                self._path,
                error,
            )
            return
        self._policy = requested(self._configured, int(fields["slices"]))


def requested(policy: Policy, slices: int) -> Policy:
    """The policy with at most `slices` slices, within the bounds of `policy`."""
    most = min(slices, policy.max_slices or slices)
    return dataclasses.replace(policy, max_slices=max(most, policy.min_slices))
