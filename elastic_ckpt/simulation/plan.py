"""The simulated run: its cluster, its policy, and the costs of its phases.

`of_config` creates the plan from a configuration, `alternatives` varies it, and
`measured` reads the costs from the log of a real run. The default costs are medians of
our benchmarks on two cores and a local disk and say little about other machines.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.elastic import decision
from elastic_ckpt.steps import owners
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.training import configured, journal, schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a simulated run. Rates are per host, in MiB/s.

    Attributes:
      step_secs: time for a step on the largest number of slices.
      end_secs: time from a loss, or from the last step before a change, to the end of
        the world. A measured value includes the time to detect a hang.
      start_secs: time until the processes of the next world have joined.
      prepare_secs: time until the job is assembled and the newest step is found.
      restore_secs: time for a restore, except for reading the state.
      compile_secs: time to compile the step in the first world of each size.
      load_secs: time to read the first batch and load the executable.
      first_step_secs: time for the first step of a world.
      block_secs: time for which a save blocks the loop, in addition to copying the
        state.
      capture_mib_per_sec: rate of copying the state while a save blocks the loop.
      ram_mib_per_sec: rate of writing to RAM and of reading from the host's own RAM or
        a peer's.
      storage_mib_per_sec: rate of writing to storage and of reading from storage.
    """

    step_secs: float = 1.72
    end_secs: float = 0.38
    start_secs: float = 0.25
    prepare_secs: float = 0.40
    restore_secs: float = 0.27
    compile_secs: float = 9.6
    load_secs: float = 0.23
    first_step_secs: float = 1.97
    block_secs: float = 0.0014
    capture_mib_per_sec: float = 4190.0
    ram_mib_per_sec: float = 1280.0
    storage_mib_per_sec: float = 1040.0

    def with_values(self, values: Mapping[str, float]) -> Costs:
        """The costs with the named values replaced.

        Raises:
          ConfigError: if a name is not the name of a cost or a value is not above 0.
        """
        for name, value in values.items():
            if name not in vars(self) or value <= 0:
                raise errors.ConfigError(
                    f"--cost {name}={value:g}: the value must be above 0, and the name"
                    f" must be one of {', '.join(vars(self))}"
                )
        return dataclasses.replace(self, **values)


def measured(
    events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> Costs:
    """The costs of a run, from its events and metrics lines.

    Each cost is a mean, because a run pays the sum.

    Raises:
      RunError: if the run has not trained a step.
    """
    names = collections.Counter(event["event"] for event in events)
    compiled = [event["secs"] for event in events if event["event"] == "compiled"]
    secs, counts = (
        {
            cause: sum(line[key] for line in lines if line["metric"] == metric.name)
            for cause, metric in metrics.GOODPUT_SECS.items()
        }
        for key in ("sum", "count")
    )
    secs["load"] = max(0.0, secs["compile"] - sum(compiled))
    phases = ("start", "prepare", "restore", "load", "first_step")
    # By cost, the sum and the number of times that the run has incurred it.
    paid = {
        "step": (
            secs["productive"] + secs["again"],
            counts["productive"] + counts["again"],
        ),
        "compile": (sum(compiled), len(compiled)),
        "end": (secs["end"], names["recovered"]),
        **{phase: (secs[phase], names["world_started"]) for phase in phases},
    }
    if not paid["step"][1]:
        raise errors.RunError(
            "the run in --costs has not recorded a step; specify a run that has trained"
        )
    return Costs(
        **{f"{cost}_secs": total / n for cost, (total, n) in paid.items() if n}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A simulated run.

    Attributes:
      copies: the policy for copying RAM saves to peers.
      host_mib: the size of each host's part of a save, in MiB.
      period: the number of steps between saves.
      in_ram: whether the plan has a local tier.
      backup_steps: the number of steps between saves that go to storage.
      secs: the time to simulate; if infinite, the run stops when all steps are
        completed.
      steps: the number of steps; if infinite, the run stops when the time is up.
    """

    slices: int
    hosts_per_slice: int
    policy: decision.Policy
    work: decision.Work
    costs: Costs
    copies: owners.Policy
    host_mib: float
    period: int
    in_ram: bool = True
    backup_steps: int
    secs: float = math.inf
    steps: float = math.inf


def of_config(
    config: schema.Config, *, costs: Costs, state_bytes: int, secs: float = math.inf
) -> RunPlan:
    """The run that a configuration describes; each slice has `state_bytes` of state.

    If `secs` is infinite, the run continues until the configured steps are completed.

    Raises:
      ConfigError: if the configuration cannot run.
    """
    if not config.checkpoint.enable_checkpointing:
        raise errors.ConfigError(
            "enable_checkpointing=false, so the run would restart from step 0 after"
            " each failure; set enable_checkpointing=true to simulate the benefit of"
            " saves"
        )
    groups = configured.groups(config)
    tiers = Chosen.from_choices(
        configured.tiers(config, persistent=journal.path_of(config))
    )
    local, peers, persistent = tiers.local, tiers.peers, tiers.persistent
    assert persistent is not None
    every_steps = 60 * (persistent.every_minutes or 0.0) / costs.step_secs
    every = persistent.every or max(1, round(every_steps))
    work = configured.work(config, groups)
    if why := work.objection(work.num_slices, work.rows):
        raise errors.ConfigError(why)
    hosts_per_slice = max(1, groups.full.hosts // groups.number)
    return RunPlan(
        slices=groups.number,
        hosts_per_slice=hosts_per_slice,
        policy=configured.policy(config, groups),
        # Cached: it is called at each slice change and takes seconds for 10,000 hosts.
        work=dataclasses.replace(work, objection=functools.cache(work.objection)),
        costs=costs,
        copies=owners.Policy(
            copies=peers.copies if peers else 0,
            assume_data_parallelism=bool(peers and peers.assume_data_parallelism),
        ),
        host_mib=state_bytes / hosts_per_slice / 2**20,
        period=local.every if local is not None else every,
        in_ram=local is not None,
        backup_steps=every,
        secs=secs,
        steps=math.inf if secs < math.inf else config.run.steps,
    )


def alternatives(planned: RunPlan) -> dict[str, RunPlan]:
    """Plans by name: as configured, with an extra spare, and with different periods."""
    plans = {"as configured": planned}
    fewer = planned.work.num_slices - 1
    policy = dataclasses.replace(
        planned.policy,
        max_slices=fewer,
        min_slices=min(planned.policy.min_slices, fewer),
    )
    decided = decision.decide(
        decision.Slices(alive_secs=dict.fromkeys(range(planned.slices), 0.0)),
        policy,
        planned.work,
    )
    if fewer and isinstance(decided, decision.Train) and len(decided.slices) == fewer:
        plans["one more spare"] = dataclasses.replace(planned, policy=policy)
    for period in {max(1, planned.period // 2), planned.period * 2}:
        plans[f"a save every {period} steps"] = dataclasses.replace(
            planned, period=period
        )
    return plans
