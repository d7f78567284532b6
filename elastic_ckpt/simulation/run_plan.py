"""The run that is simulated, and its outcome."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from elastic_ckpt.elastic import decision
from elastic_ckpt.simulation.hardware import Hardware
from elastic_ckpt.simulation.saves import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is simulated.

    Attributes:
      hardware: of its cluster.
      policy: for slices that are lost and come back.
      work: of a step.
      setting: what it saves, and the costs of everything.
      period: steps between two saves.
      backup_steps: steps between two backups to storage; 0 if minutes count.
      backup_minutes: minutes between them; 0 if steps count.
      hang_secs: until a host that hangs is lost.
      compiles_ahead: whether the program for one slice fewer is compiled meanwhile.
      by_racks: whether copies are spread over racks, and not over slices.
      secs: the time that is simulated; infinite until all steps are done.
      steps: of the run; 0 for as many as there is time for.
    """

    hardware: Hardware
    policy: decision.Policy
    work: decision.Work
    setting: Setting
    period: int
    backup_steps: int = 0
    backup_minutes: float = 0.0
    hang_secs: float = 30.0
    compiles_ahead: bool = True
    by_racks: bool = False
    secs: float = math.inf
    steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a simulated run.

    Attributes:
      goodput_percent: of its time, the part that trained new steps.
      secs: by cause, as in `monitoring.goodput`.
      steps: that it has done.
      rows: that they trained on.
      steps_lost: of all changes, trained again.
      losses: worlds that were lost.
      planned: worlds that were left for other slices.
      restarts: times that the run ended, and was started anew.
      restores: by the farthest kind of place that was read; `none` began anew.
      bytes: by what was done with them.
    """

    goodput_percent: float
    secs: Mapping[str, float]
    steps: int
    rows: int
    steps_lost: int
    losses: int
    planned: int
    restarts: int
    restores: Mapping[str, int]
    bytes: Mapping[str, int]
