"""Follows a live run: its newly complete steps, each leased while it is read.

A program that evaluates or exports steps needs no part in the run and no devices of it:

    for step_path in ec.watch_steps("gs://bucket/run/checkpoints"):
        loss = evaluate(ocp.load(step_path))
        ec.record_metrics(step_path, {"eval_loss": loss})

The metrics count for the run's retention as if the run had evaluated the step itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, errors, storage, user_json
from elastic_ckpt.tiers.persistent import evaluations, leases, persistent_root
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot

_POLL_SECS = 10.0


def watch_steps(
    directory: epath.PathLike,
    *,
    after: int = -1,
    poll_secs: float = _POLL_SECS,
    timeout_secs: float | None = None,
    duration_secs: float = leases.DURATION_SECS,
) -> Iterator[epath.Path]:
    """Waits for the steps of a run, and yields each as it becomes complete in storage.

    Each step is kept by a lease (`ec.lease`) until the next one is requested. Steps
    that the run removes before their turn are passed over. A step that the run saves
    again, after it went back to an earlier one, is yielded again.

    Args:
      directory: where the run keeps its steps in storage; it need not exist yet.
      after: only later steps are yielded; by default all that are there.
      poll_secs: the time between two looks at the storage.
      timeout_secs: ends the iteration when there was no new step for so long; None
        never ends it.
      duration_secs: the duration of the leases, as for `ec.lease`.

    Yields:
      The directory of each step, in ascending order.

    Raises:
      CheckpointError: if the lease of a step was lost while it was read.
    """
    root = PersistentRoot.from_path(directory)
    # By step, the save that was yielded.
    yielded: dict[int, str | None] = {}
    found_secs = time.monotonic()
    _warn_if_missing(root)
    while True:
        step = _next(root, yielded, after)
        if step is None:
            waited_secs = time.monotonic() - found_secs
            if timeout_secs is None:
                time.sleep(poll_secs)
            elif waited_secs < timeout_secs:
                time.sleep(min(poll_secs, timeout_secs - waited_secs))
            else:
                return
            continue
        path = root.final(step)
        try:
            save = persistent_root.committed_save(path)
            with leases.lease(path, duration_secs=duration_secs) as held:
                yielded[step] = save
                yield held
        except leases.StepGoneError as error:
            logging.info("%s", error)
            time.sleep(poll_secs)
        found_secs = time.monotonic()


def record_metrics(step_path: epath.PathLike, metrics: Mapping[str, Any]) -> None:
    """Records metrics of a saved step, so that its run ranks it by them (`ec.BestN`).

    Any program may call it, during the run or later. The run counts the metrics from
    its next save on. They belong to this save of the step: if the run goes back and
    saves the step again, they do not count for that.

    Args:
      step_path: the directory of the step in persistent storage.
      metrics: numbers by name; they replace those that were recorded for it before.

    Raises:
      CheckpointError: if this is not a step that a run of this library has saved, or
        the metrics are not JSON.
      OSError: if storage is unavailable; for a bucket, it may be its client's error.
    """
    directory = storage.absolute(step_path)
    run = persistent_root.run_of(directory) if directory.is_dir() else None
    save = None if run is None else persistent_root.committed_save(directory)
    if run is None or save is None or not directory.name.isdecimal():
        raise errors.CheckpointError(
            f"{directory} is not a step that a run of this library has committed; name"
            " PERSISTENT_DIRECTORY/<step>"
        )
    evaluations.record(
        PersistentRoot.from_path(directory.parent),
        evaluations.Evaluation(
            run=run,
            step=int(directory.name),
            save=save,
            metrics=user_json.text_of("metrics", metrics),
        ),
    )


def _warn_if_missing(root: PersistentRoot) -> None:
    try:
        if root.path.exists():
            return
    except bucket_clients.failures():
        return  # The first look at the steps reports it.
    logging.warning(
        "watch_steps: there is no directory %s yet; unless a run is about to create it,"
        " give the directory of its ec.Persistent",
        root.path,
    )


def _next(
    root: PersistentRoot, yielded: dict[int, str | None], after: int
) -> int | None:
    # The oldest step that was not yielded; None if there is none.
    try:
        steps = root.steps()
        # A step that is gone may come back as another save.
        for step in set(yielded).difference(steps):
            del yielded[step]
        newest = steps[-1] if steps else None
        for step in steps:
            if step <= after:
                continue
            if step not in yielded:
                return step
            # Only the newest step is overwritten in its place.
            if step == newest:
                save = persistent_root.committed_save(root.final(step))
                if save != yielded[step]:
                    return step
    except (errors.CheckpointError, *bucket_clients.failures()) as error:
        logging.warning("the steps in %s cannot be followed now: %s", root.path, error)
    return None
