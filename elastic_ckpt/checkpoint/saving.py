"""A step on its way through the stages of a save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.checkpoint.restore import Found
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
