"""Several settings of a run, simulated under the same failures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from elastic_ckpt.config import load, schema
from elastic_ckpt.core import errors
from elastic_ckpt.simulation import configured, simulated_run, trace
from elastic_ckpt.simulation.configured import Cluster
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.decisions import Decisions
from elastic_ckpt.simulation.failures import FailureModel
from elastic_ckpt.simulation.hardware import Hardware
from elastic_ckpt.simulation.run_plan import Outcome
from elastic_ckpt.simulation.world_layout import WorldLayout
from elastic_ckpt.steps import placement

# Settings of the cluster that may vary besides the keys of a configuration.
OF_CLUSTER = ("spares", "slices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The things that all settings have in common.

    Attributes:
      config: the path of a configuration.
      overrides: of it, `key=value`.
      cluster: its size.
      costs: of phases.
      failures: drawn at random.
      trace: the path of a trace, in place of those; empty for none.
      secs: to simulate; infinite until the configured steps are done.
      state_bytes: of the state; 0 computes those of the configured model.
      is_cached: whether decisions are.
    """

    config: str
    overrides: Sequence[str] = ()
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    costs: Costs = dataclasses.field(default_factory=Costs)
    failures: FailureModel = dataclasses.field(default_factory=FailureModel)
    trace: str = ""
    secs: float = math.inf
    state_bytes: int = 0
    is_cached: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One setting, simulated.

    Attributes:
      values: of what varies; empty if nothing does.
      hardware: of the cluster.
      outcome: of the run.
    """

    values: Mapping[str, str]
    hardware: Hardware
    outcome: Outcome

    @property
    def name(self) -> str:
        """The setting, for people."""
        return _name(self.values)


def settings(varied: Sequence[str]) -> list[dict[str, str]]:
    """All combinations of `key=value,value` texts.

    Raises:
      ConfigError: if a text has another form.
    """
    choices = []
    for text in varied:
        key, _, values = text.partition("=")
        listed = [value for value in values.split(",") if value]
        if not (key and listed):
            raise errors.ConfigError(
                f"--vary {text}: write a key and its values, such as"
                " --vary local_checkpoint_period=5,20,100"
            )
        choices.append([(key, value) for value in listed])
    return [dict(each) for each in itertools.product(*choices)]


def run(study: Study, varied: Sequence[str] = ()) -> list[Result]:
    """Simulates each setting.

    Raises:
      ConfigError: if one of them cannot run.
    """
    size = study.state_bytes
    if not size:
        size = configured.state_bytes(load.load(study.config, study.overrides))
    decisions: dict[placement.Policy, Decisions] = {}
    results = []
    for values in settings(varied):
        config, cluster = _configured(study, values)
        try:
            plan = configured.plan(
                config, cluster, costs=study.costs, state_bytes=size, secs=study.secs
            )
        except errors.ConfigError as error:
            raise errors.ConfigError(f"{_name(values)}: {error}") from error
        policy = configured.copies(config)
        if policy not in decisions:
            layout = WorldLayout(state_bytes=size, domain=policy.domain)
            decisions[policy] = Decisions(layout, policy, is_cached=study.is_cached)
        outcome = simulated_run.simulate(
            plan, _events(study, plan.hardware), decisions[policy]
        )
        result = Result(values=values, hardware=plan.hardware, outcome=outcome)
        results.append(result)
    return results


def _configured(
    study: Study, values: Mapping[str, str]
) -> tuple[schema.Config, Cluster]:
    keys = [f"{k}={v}" for k, v in values.items() if k not in OF_CLUSTER]
    changed = {key: _number(key, values[key]) for key in OF_CLUSTER if key in values}
    config = load.load(study.config, [*study.overrides, *keys])
    return config, dataclasses.replace(study.cluster, **changed)


def _events(study: Study, hardware: Hardware) -> list[trace.Event]:
    if not study.trace:
        return study.failures.trace(hardware, secs=study.secs)
    targets = ("slice", "rack", "machine")
    numbers = {target: hardware.number_of(target) for target in targets}
    return trace.read(study.trace, numbers=numbers)


def _name(values: Mapping[str, str]) -> str:
    listed = [f"{key}={value}" for key, value in values.items()]
    return ", ".join(listed) or "as configured"


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise errors.ConfigError(f"--vary {key}={text}: write whole numbers")
    return int(text)
