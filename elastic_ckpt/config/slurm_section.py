"""The keys of the batch script that `elastic-ckpt manifest --slurm` writes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSection:
    """The batch script of `elastic-ckpt manifest --slurm` (guides/slurm.md)."""

    slurm_tasks_per_node: int = key(
        1, "Hosts on a node; `hosts` are divided among so many nodes.", at_least=1
    )
    slurm_partition: str = key("", "The partition; empty takes the cluster's default.")
    slurm_account: str = key("", "The account that is charged; empty takes yours.")
    slurm_time: str = key(
        "", "The time limit, 2-00:00:00 for two days; empty takes the partition's."
    )
    slurm_gres: str = key(
        "",
        "Generic resources of a node, such as gpu:h100:8; empty takes devices_per_host"
        " GPUs for each host with hardware=gpu.",
    )
    slurm_options: str = key(
        "",
        "Further options of sbatch: {constraint: ib, exclusive: true, mem: 0}.",
        lists="yaml",
    )
    slurm_ram_directory: str = key(
        "/dev/shm",
        "The RAM disk of a node; each job has a directory there, which it removes when"
        " the run has ended.",
    )
    slurm_setup: str = key(
        "",
        "Commands that a node runs before the program, such as module load cuda; may"
        " have several lines.",
    )
    slurm_port: int = key(
        0,
        "The first port of the supervisors of an elastic run; 0 takes one by the number"
        " of the job.",
        at_least=0,
    )
