"""A step on its way through the stages of a save."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.metadata import CheckpointMetadata
from elastic_ckpt.core import errors
from elastic_ckpt.manifests import line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving:
    """A step that was captured.

    Attributes:
      step: the training step.
      save: which save of it.
      write_components: has them write their files.
      back_up: whether it goes to persistent storage.
      overwrite: whether other saves of the step are removed from there.
      described: for retention and persistent storage.
      parents: of the save; see `manifests.line`.
      path: the directory that it has in persistent storage; None without such a tier.
      began_secs: when it was begun, on the monotonic clock.
      stored: set when the step is in persistent storage.
    """

    step: int
    save: str
    write_components: Callable[[], None]
    back_up: bool
    overwrite: bool
    described: Described
    parents: Sequence[tuple[int, str]]
    began_secs: float
    path: epath.Path | None = None
    stored: threading.Event = dataclasses.field(default_factory=threading.Event)

    def agreed(self, hosts: Hosts) -> Saving:
        """The same with the notes of host 0: a step has one set of notes."""
        of_hosts = hosts.all("world.say", self.described.of_host)
        return dataclasses.replace(self, described=self.described.agreed(of_hosts[0]))

    def write(self) -> tuple[dict[str, Any], str | None]:
        """Has components write their files; the notes of the step, or the problem."""
        try:
            self.write_components()
            return {**self.described.notes(), "parents": self.parents}, None
        except (errors.ElasticCkptError, OSError) as error:
            return {}, str(error)
        except Exception as error:
            # Other hosts are told of a bug, too: they would wait for this one.
            logging.exception("components were not written")
            return {}, f"components were not written: {error!r}"

    def upload(self, hosts: Hosts) -> tuple[int, list[str]]:
        """Has the hosts commit what they hold of the step to persistent storage.

        Returns:
          The bytes, and the copies that proved to be bad, a sentence each.

        Raises:
          HostsFailed: if it is not committed.
        """
        place = (self.step, self.save)
        chunks = hosts.first("backup.chunk_shapes", *place)
        names = self.described.names(chunks)
        uploaded = hosts.all("backup.back_up", *place, names)
        hosts.first("backup.commit", *place, names, self.described.files(chunks))
        bad = dict.fromkeys(why for each in uploaded for why in each["bad"])
        return sum(each["bytes"] for each in uploaded), list(bad)

    def committed(self, time_ms: int) -> CheckpointMetadata:
        """The step once it is committed.

        Args:
          time_ms: when that was, since the epoch.
        """
        return CheckpointMetadata(
            step=self.step,
            save=self.save,
            line=line.after(self.step, self.save, self.parents),
            path=self.path,
            metrics=self.described.metrics,
            custom_metadata=self.described.custom_metadata,
            commit_timestamp_nsecs=1_000_000 * time_ms,
        )
