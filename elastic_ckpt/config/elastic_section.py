"""The keys of elastic runs: slices and machines that are lost, and come back."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """Elastic runs: slices that are lost, and slices that come back."""

    elastic_enabled: bool = key(
        False,
        "When a slice is lost, continue on the others, and take it back when it"
        " returns. If false, the run ends when a host fails.",
    )
    elastic_min_slice_count: int = key(
        0, "Minimum number of slices to train on; 0 requires all.", at_least=0, off=-1
    )
    elastic_max_slice_count: int = key(
        0,
        "Maximum number of slices to train on. Slices beyond it are spares, which"
        " replace lost ones; 0 trains on all.",
        at_least=0,
    )
    elastic_timeout_seconds: int = key(
        300,
        "How long to wait for elastic_min_slice_count slices before the run ends.",
        at_least=0,
    )
    elastic_max_retries: int = key(
        10,
        "How often the run may continue after a loss without a new step in between;"
        " then it ends with the first cause.",
        at_least=0,
    )
    elastic_settle_seconds: float = key(
        10.0,
        "How long a slice must be back before the run continues on it.",
        at_least=0,
    )
    elastic_quarantine_failures: int = key(
        3,
        "Failures within elastic_quarantine_seconds after which a slice is not used"
        " again until the next start: it was lost, or computed wrong values when it"
        " came back. 0 disables this.",
        at_least=0,
    )
    elastic_quarantine_seconds: float = key(
        3600.0, "The time within which the failures of a slice are counted.", at_least=0
    )
    elastic_leave_out_slow_hosts: bool = key(
        False,
        "Continue without the slices of slow hosts if enough others are left, until"
        " they are replaced or the run is started again. If false, slow hosts are only"
        " reported.",
    )
    elastic_hang_timeout_seconds: float = key(
        600.0,
        "Maximum time that a host may take for a step, or to compile one. Its own"
        " earlier steps shorten the limit; those of other hosts do not.",
        at_least=1,
    )
    elastic_heartbeat_timeout_seconds: float = key(
        30.0,
        "A host that sends no heartbeat for this long, because it is stopped or"
        " frozen, counts as lost.",
        at_least=2,
    )
    elastic_compile_ahead_seconds: float = key(
        600.0,
        "Time limit to compile the program for one slice fewer, at low priority,"
        " while the run trains; 0 compiles it only when a slice is lost.",
        at_least=0,
    )
    elastic_machines: int = key(
        1,
        "Number of machines of the run, among which the slices are divided evenly."
        " Start the same command on each; the one that holds the claim beside the"
        " steps in base_output_directory, which all share, leads the others.",
        at_least=1,
    )
    elastic_machine: int = key(
        -1,
        "Number of this machine, from 0. -1 reads it from NODE_RANK, SLURM_NODEID or"
        " JOB_COMPLETION_INDEX in the environment.",
        at_least=-1,
    )
    elastic_machine_timeout_seconds: float = key(
        10.0,
        "A machine that gives no sign of life for this long counts as lost. If it"
        " leads, its claim lapses, and another machine leads.",
        at_least=2,
    )
    faults: str = key(
        "",
        "Failures to inject, for tests and demonstrations: [{kill_slice: 1, at_step:"
        " 40}, {return_slice: 1, at_step: 80}]. Others are kill_host, hang_host,"
        " slow_host and cut_off; in_phase: restore (or another) and in_world: 2 may"
        " replace at_step.",
        lists="any",
    )
