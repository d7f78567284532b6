"""Compares the states of replicated components on all hosts, when a step is saved.

Host 0 writes the state for all, so a host whose state differs would lose it without a
word, and all hosts would continue from a state that perhaps no other one had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.checkpoint import components
from elastic_ckpt.components import state_leaves, validation, validation_schedule
from elastic_ckpt.components.patterns import Replicated
from elastic_ckpt.core import events, topology

_MOST_CHARACTERS = 500


def compare(
    step: int, stateful: Mapping[str, Any], *, emit: events.Emit
) -> list[validation.Finding]:
    """Compares those that ask for it (`Replicated.validation`); all hosts call it.

    Args:
      step: that is saved.
      stateful: the components of the step, by name.
      emit: called on the first host, for each difference.

    Returns:
      The differences, the same on all hosts: their leaves begin with the component.

    Raises:
      RunError: if a host did not answer in time.
    """
    compared = {
        name: component
        for name, component in stateful.items()
        if isinstance(component, Replicated) and component.validation != "none"
    }
    if not compared or topology.num_hosts() == 1:
        return []
    strongest = max(
        (each.validation for each in compared.values()), key=validation.LEVELS.index
    )
    states = {name: _leaves(name, each) for name, each in compared.items()}
    findings = validation.validate(states, level=strongest)
    if topology.is_primary():
        validation_schedule.report(step, findings, emit=emit)
    return findings


def _leaves(name: str, component: Replicated) -> dict[str, Any]:
    try:
        return state_leaves.leaves(components.state_of(component, name=name))
    except Exception as error:
        # The save that follows fails with it, on all hosts.
        return {"problem": repr(error)[:_MOST_CHARACTERS]}
