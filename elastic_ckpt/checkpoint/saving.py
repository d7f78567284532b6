"""A step on its way through the stages of a save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from absl import logging

from elastic_ckpt.checkpoint import components
from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.restore import Found
from elastic_ckpt.core import errors
from elastic_ckpt.host import backup_requests, save_requests
from elastic_ckpt.host.answers import BackedUp, Written
from elastic_ckpt.host.step_notes import StepNotes
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
      began_secs: when it was begun, on the monotonic clock.
    """

    step: int
    save: str
    write_components: Callable[[], None]
    back_up: bool
    overwrite: bool
    described: Described
    parents: Sequence[tuple[int, str]]
    began_secs: float

    def prepare(self) -> tuple[StepNotes | None, str | None]:
        """Writes the files of components.

        Returns:
          The notes of the step; or the problem that all hosts fail the step with.
        """
        try:
            self.write_components()
            return self.described.notes(self.parents), None
        except (errors.ElasticCkptError, OSError) as error:
            return None, str(error)
        except Exception as error:
            # Reported to all hosts, which would wait for this one.
            logging.exception("components were not written")
            return None, f"components were not written: {error!r}"

    def committed(self, time_ms: int) -> Found:
        """The step once it is committed.

        Args:
          time_ms: when that was, since the epoch.
        """
        return Found(
            step=self.step,
            save=self.save,
            line=line.after(self.step, self.save, self.parents),
            metrics=self.described.metrics,
            custom_metadata=self.described.custom_metadata,
            commit_timestamp_nsecs=1_000_000 * time_ms,
        )


def committing(
    saving: Saving, written: Sequence[Written], notes: StepNotes | None
) -> save_requests.CommitStep:
    """Returns the request that commits a step, or holds it for a backup.

    Args:
      saving: the step.
      written: by all hosts.
      notes: of the step; there are some if it was written.
    """
    assert notes is not None
    return save_requests.CommitStep(
        step=saving.step,
        save=saving.save,
        parts=components.numbered([each.files for each in written]),
        notes=dataclasses.replace(notes, time_ms=written[0].time_ms),
    )


def upload(hosts: Hosts, saving: Saving) -> list[BackedUp]:
    """Uploads a committed or held step from all hosts, and commits it to storage.

    Raises:
      HostsFailed: if a host failed.
    """
    step, save, described = saving.step, saving.save, saving.described
    chunks = hosts.first(backup_requests.GetChunkShapes(step=step, save=save))
    names = described.names(chunks)
    share = backup_requests.BackUpStep(step=step, save=save, names=names)
    answers = hosts.all(share)
    files = described.files(chunks)
    hosts.first(backup_requests.CommitBackup(**vars(share), orbax_files=files))
    return answers
