"""Compares the states of replicated components on all hosts, when a step is saved.

Host 0 writes the state for all, so a host whose state differs would lose it without a
word, and all hosts would continue from a state that perhaps no other one had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.checkpoint.components import (
    encoding,
    validation,
    validation_schedule,
)
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.components.encoding import Encoded
from elastic_ckpt.core import events, topology


class Comparison:
    """The states that a save has taken of the components that ask for a comparison.

    Args:
      step: that is saved.
      stateful: the components of the step, by name, once their states were taken.
      emit: called on the first host, for each difference.
    """

    def __init__(
        self, step: int, stateful: Mapping[str, Any], *, emit: events.Emit
    ) -> None:
        self._step = step
        self._emit = emit
        self._level: validation.Level = "none"
        self._taken: dict[str, Encoded | None] = {}
        for name, component in stateful.items():
            if isinstance(component, Component) and component.is_compared:
                self._taken[name], component.taken = component.taken, None
                self._level = max(
                    self._level, component.validation, key=validation.LEVELS.index
                )

    def run(self) -> list[validation.Finding]:
        """Compares them, once; all hosts call it, with the same components.

        Returns:
          The differences, the same on all hosts: their leaves begin with the component.

        Raises:
          RunError: if a host did not answer in time.
        """
        taken, self._taken = self._taken, {}
        if not taken:
            return []
        states = {name: _leaves(encoded) for name, encoded in taken.items()}
        findings = validation.compared(
            states, level=self._level, kind="replicated components"
        )
        if topology.is_primary():
            validation_schedule.report(self._step, findings, emit=self._emit)
        return findings


def _leaves(encoded: Encoded | None) -> dict[str, Any]:
    if encoded is None:
        # The save fails with it, on all hosts.
        return {"problem": "its state could not be taken"}
    return encoding.leaves(encoded)
