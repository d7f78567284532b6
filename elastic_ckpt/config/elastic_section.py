"""The keys of elastic runs: slices and machines that are lost, and come back."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """Elastic runs: slices that are lost, and slices that come back."""

    elastic_enabled: bool = key(
        False,
        "Continue on the slices that are left when one is lost, and on more when one"
        " comes back. Otherwise the run ends with its first host.",
    )
    elastic_min_slice_count: int = key(
        0, "The least number of slices to train on; 0 takes all.", at_least=0, off=-1
    )
    elastic_max_slice_count: int = key(
        0,
        "The greatest number of slices to train on; slices beyond it are spares, which"
        " replace lost ones. 0 takes all.",
        at_least=0,
    )
    elastic_timeout_seconds: int = key(
        300,
        "How long to wait for that many slices before the run ends.",
        at_least=0,
    )
    elastic_max_retries: int = key(
        10,
        "How often the run continues without a new step since the last loss; then it"
        " ends with the first cause.",
        at_least=0,
    )
    elastic_settle_seconds: float = key(
        10.0,
        "How long a slice has to be back before the run continues on it.",
        at_least=0,
    )
    elastic_quarantine_failures: int = key(
        3,
        "A slice that fails so often within elastic_quarantine_seconds (it is lost, or"
        " computes wrong values when it comes back) is not used again before the next"
        " start; 0 disables it.",
        at_least=0,
    )
    elastic_quarantine_seconds: float = key(
        3600.0, "The time within which failures of a slice add up.", at_least=0
    )
    elastic_leave_out_slow_hosts: bool = key(
        False,
        "Continue without the slices of slow hosts if enough others are left. They are"
        " not used again before they are replaced, or the next start. Otherwise slow"
        " hosts are only named.",
    )
    elastic_hang_timeout_seconds: float = key(
        600.0,
        "The longest that a host may take without a step, or to compile one. Steps that"
        " it has done before set it a shorter limit, and what other hosts took none.",
        at_least=1,
    )
    elastic_heartbeat_timeout_seconds: float = key(
        30.0,
        "A host that sends no heartbeat for so long, stopped or frozen, is lost.",
        at_least=2,
    )
    elastic_compile_ahead_seconds: float = key(
        600.0,
        "While the run trains, the program for one slice fewer is compiled at low"
        " priority, within so many seconds; 0 compiles when a slice is lost.",
        at_least=0,
    )
    elastic_machines: str = key(
        "",
        "The machines of the run, `host:port` separated by `;`, the same on all: the"
        " supervisor of each agrees with the others at its address, and the slices are"
        " dealt evenly. Start the same command on each. Empty takes this one alone.",
    )
    elastic_machine: int = key(
        -1,
        "The number of this machine in elastic_machines, from 0; -1 takes NODE_RANK,"
        " SLURM_NODEID or JOB_COMPLETION_INDEX from the environment.",
        at_least=-1,
    )
    elastic_machine_timeout_seconds: float = key(
        10.0,
        "A machine that gives no sign for so long is lost; the lowest one left leads.",
        at_least=2,
    )
    elastic_machine_majority: bool = key(
        False,
        "Continue only with more than half of the machines; needed if they do not share"
        " the storage of base_output_directory.",
    )
    faults: str = key(
        "",
        "Faults to inject, for tests and demonstrations, such as [{kill_slice: 1,"
        " at_step: 40}, {return_slice: 1, at_step: 80}]; also kill_host, hang_host,"
        " slow_host, cut_off, and in_phase: restore (or another) of in_world: 2.",
        lists="any",
    )
