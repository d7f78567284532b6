"""The audit of a run's directory: its step log, compared with its own data, read anew.

The step log has the settings of the data; of a loop of the user's own it does not, and
the data is named.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from concurrent import futures

from etils import epath

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import errors, sections, storage
from elastic_ckpt.data import (
    cursors,
    data_keys,
    elastic_data,
    positional_data,
    state,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import audit, provenance, step_log

# Data states that are read at once.
_READERS = 16


class RunAudit:
    """A run that was recorded in a directory, and its data.

    Args:
      directory: of the run.
      data: `MODULE:NAME` of the data, if a loop of the user's own has trained on it.

    Raises:
      RunError: if there is no run.
      ConfigError: if its data is not named, or is named and in its step log.
      DataError: if it has trained nothing, or its data cannot be read.
    """

    def __init__(
        self,
        directory: str,
        *,
        data: str | None = None,
    ) -> None:
        self._directory = directory
        self._record = record = run_files.read(directory)
        self._attempts = step_log.read(directory)
        if record.data is None and data is None:
            raise errors.ConfigError(
                f"{directory} was recorded by your own training loop, whose data is"
                " defined in its program; name it with --data MODULE:NAME"
            )
        if data is not None and record.data is not None:
            raise errors.ConfigError(
                f"--data: the data of {directory} is in its configuration; leave"
                " --data out"
            )
        self._own = None if data is None else _named(data)

    def outcome(self) -> audit.Audit:
        """Compares the run with one host that reads its data."""
        record, attempts = self._record, self._attempts
        saved = max(foreign_steps.steps(record.steps_directory), default=None)
        start_step = attempts[0].start_step
        num_done = start_step + len(step_log.lineage(attempts))
        events = run_files.read_events(self._directory)
        missing = audit.missing_checkpoint(
            period=record.every,
            at_end=record.at_end,
            finished=[e["event"] for e in events[-1:]] == ["run_finished"],
            num_steps=num_done - 1 + record.first_step,
            saved=saved or 0,
            start_step=start_step,
        )
        last = self._data_of(attempts[-1].attempt)
        is_text = isinstance(last, positional_data.TextData)
        return audit.audit(
            attempts,
            self._data_of,
            num_records=last.num_records if is_text else None,
            num_saved_steps=0 if saved is None else saved + 1 - record.first_step,
            first_step=record.first_step,
            missing_checkpoint=missing,
        )

    def documents(
        self, announce: Callable[[provenance.Reading], None]
    ) -> provenance.Provenance:
        """Answers questions about the documents of the run.

        Args:
          announce: is told what will be read, before it is.
        """
        steps = foreign_steps.steps(self._record.steps_directory)
        with futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(_saved_at, steps.keys(), steps.values()))
        return provenance.Provenance(
            self._attempts,
            self._data_of,
            saved=[each for of_step in found for each in of_step],
            first_step=self._record.first_step,
            announce=announce,
        )

    @functools.cached_property
    def _keys(self) -> dict[int, data_keys.DataKeys]:
        return {
            each.attempt: data_keys.changed(
                data_keys.DataKeys(),
                {
                    key: sections.Setting(
                        value=value, place=f"the log of attempt {each.attempt}"
                    )
                    for key, value in each.data.items()
                },
            )
            for each in self._attempts
        }

    def _data_of(self, attempt: int) -> elastic_data.ElasticData:
        if self._own is not None:
            return self._own
        return pipeline.from_config(self._keys[attempt])


def _named(name: str) -> elastic_data.ElasticData:
    module, _, attribute = name.partition(":")
    # As `python -m` does. The module may change sys.path, too.
    own = os.getcwd()
    sys.path.insert(0, own)
    try:
        data = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ConfigError(
            f"--data {name}: {error}; write MODULE:NAME, of a module that can be"
            " imported here"
        ) from error
    finally:
        if own in sys.path:
            sys.path.remove(own)
    if callable(data):
        try:
            inspect.signature(data).bind()
        except (TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"--data {name}: {attribute} cannot be called without arguments"
                f" ({error}); name the data, as ec.batches was given it, or a function"
                " that returns it"
            ) from None
        data = data()
    elastic_data.check(data, caller=f"--data {name}")
    return data


def _saved_at(step: int, path: epath.Path) -> list[provenance.SavedData]:
    # The data states of a step that can be read, nearly always one.
    found = []
    for part in path.iterdir():
        # An older state serves, too.
        with contextlib.suppress(errors.DataError):
            if (part / state.FILE_NAME).exists():
                saved = state.read(part)
                read = functools.partial(_cursors, part, saved.position)
                found.append(provenance.SavedData(step=step, state=saved, cursors=read))
    return found


def _cursors(
    part: epath.Path, position: dict[str, storage.Json], shards: Iterable[int]
) -> cursors.Cursors:
    return cursors.read(part, shards, position)
