"""The run that is simulated: its cluster, its policy, and what its phases cost.

`of_config` takes it from a configuration, `alternatives` varies it, and `measured`
reads the costs from the log of a real run. The costs are otherwise medians of our
benchmarks, on two cores and a local disk, which say little about other machines.
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
    """The costs of a simulated run. Rates are of each host, in MiB/s.

    Attributes:
      step_secs: a step on all slices that train at most.
      end_secs: from a loss, or from the last step before a change, until the world has
        ended; the mean of a run includes the time in which a hang is found.
      start_secs: until the processes of the next world have joined.
      prepare_secs: until the job is assembled, and the newest step is found.
      restore_secs: of a restore, besides reading the state.
      compile_secs: of compiling, in the first world of a number of slices.
      load_secs: until the first batch is read, and the step loaded.
      first_step_secs: of a world.
      block_secs: that a save holds up the loop, besides copying the state.
      capture_mib_per_sec: copied while a save holds up the loop.
      ram_mib_per_sec: written to RAM, and read from a host's own or a peer's.
      storage_mib_per_sec: written to storage, and read from it.
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
        """The costs with other values, by their names.

        Raises:
          ConfigError: if there is no cost of a name, or its value is not above 0.
        """
        for name, value in values.items():
            if name not in vars(self) or value <= 0:
                raise errors.ConfigError(
                    f"--cost {name}={value:g}: give a value above 0 to one of"
                    f" {', '.join(vars(self))}"
                )
        return dataclasses.replace(self, **values)


def measured(
    events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> Costs:
    """The costs of a run: means, because a run pays their sum.

    Args:
      events: of the run, in order.
      lines: of its metrics.

    Raises:
      RunError: if the run has trained no step.
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
    # By cost, its sum, and how often the run has paid it.
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
            "the run of --costs has recorded no step; name one that has trained"
        )
    return Costs(
        **{f"{cost}_secs": total / n for cost, (total, n) in paid.items() if n}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is simulated.

    Attributes:
      slices: of its cluster.
      hosts_per_slice: the hosts of each.
      policy: for slices that are lost and come back.
      work: of a step.
      costs: of phases.
      copies: of what a host saves in RAM.
      host_mib: that a host saves, in MiB.
      period: steps between two saves.
      in_ram: whether there is a local tier.
      backup_steps: steps between two saves that go to storage.
      secs: the time that is simulated; infinite until all steps are done.
      steps: of the run; infinite for as many as there is time for.
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
    """The run of a configuration.

    Args:
      config: of the run.
      costs: of phases.
      state_bytes: of the state, in one slice.
      secs: to simulate; infinite until the configured steps are done.

    Raises:
      ConfigError: if the configuration cannot run.
    """
    if not config.checkpoint.enable_checkpointing:
        raise errors.ConfigError(
            "enable_checkpointing=false: such a run begins anew after each failure; set"
            " it to true to simulate what saves are worth"
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
        # It takes seconds for 10,000 hosts, and is asked at each change of slices.
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
    """The plan, one with another spare, and two with other periods, by their names."""
    plans = {"as configured": planned}
    fewer = planned.work.num_slices - 1
    policy = dataclasses.replace(
        planned.policy,
        max_slices=fewer,
        min_slices=min(planned.policy.min_slices, fewer),
    )
    decided = decision.decide(
        decision.Slices(present_secs=dict.fromkeys(range(planned.slices), 0.0)),
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
