"""The keys of the batch script that `elastic-ckpt manifest --slurm` writes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSection:
    """The batch script of `elastic-ckpt manifest --slurm` (guides/slurm.md)."""

    slurm_tasks_per_node: int = key(
        1,
        "Hosts on each node; the job requests `hosts` divided by this many nodes.",
        at_least=1,
    )
    slurm_partition: str = key("", "Partition; empty uses the cluster's default.")
    slurm_account: str = key("", "Account to charge; empty uses your default.")
    slurm_time: str = key(
        "", "Time limit, such as 2-00:00:00 for two days; empty uses the partition's."
    )
    slurm_gres: str = key(
        "",
        "Generic resources of each node, such as gpu:h100:8. Empty requests"
        " devices_per_host GPUs for each host with hardware=gpu.",
    )
    slurm_options: str = key(
        "",
        "Further options of sbatch, such as {constraint: ib, exclusive: true, mem: 0}.",
        lists="yaml",
    )
    slurm_ram_directory: str = key(
        "/dev/shm",
        "RAM disk of each node. Each job has a directory there, and removes it when"
        " the run has ended.",
    )
    slurm_setup: str = key(
        "",
        "Commands that each node runs before the program, such as module load cuda;"
        " several lines are allowed.",
    )
