"""The batch script that runs a configuration on Slurm.

Each host is a task of one `srun`; JAX detects the others from Slurm's variables. The
script writes the program's files to a directory of the job on the RAM disk of each
node, where the steps in RAM are too. A requeued job has the same number: where it gets
the same nodes it continues from their RAM, and elsewhere from storage.

`elastic-ckpt train` and `maxtext` with elastic_enabled=true have a supervisor on each
node instead, which starts the hosts of the node; the run goes on without nodes that are
lost.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import names, program, quantity, settings, template
from elastic_ckpt.training import schema

# The keys of pods that Slurm has, too; others would be lost in silence.
_OF_SLURM = ("pod_env", "program_cpus", "program_memory", "reservation")
# Those of the deployment that only Kubernetes has.
_OF_KUBERNETES = (
    "backup_hosts",
    "kueue_queue",
    "local_checkpoint_volume",
    "manifest_patches",
    "metrics_monitor",
    "restart_strategy",
)
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|")
_NAME = re.compile(r"[\w.-]+")
_DIRECTORY = re.compile(r"(/[\w.-]+)+/?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
# Ends the files in the script, as in its template.
_FILE_END = "END_OF_FILE"
# Stands for the directory of the files, which is known on the nodes alone.
_RAM = "RAM:/"
# All hosts find a wrong configuration, and end with its status by themselves. Those
# that a host leaves alone end when JAX misses it, at the latest after 300 seconds.
_OF_HOSTS = "--label --kill-on-bad-exit=0 --wait=300"
_OF_SUPERVISORS = "--label --no-kill --kill-on-bad-exit=0 --wait=0"


def script(config: schema.Config) -> str:
    """The text of the script, for `sbatch`.

    Raises:
      ConfigError: if a value is invalid; names the key and a remedy.
    """
    _check(config)
    files = "".join(
        f'on_each_node bash -c "$write" - "$ram" {name} <<\'{_FILE_END}\' || exit\n'
        f"{text}{_FILE_END}\n"
        for name, text in program.files(config).items()
    )
    directory = config.slurm.slurm_ram_directory.rstrip("/")
    holes = {
        "options": "\n".join(f"#SBATCH {option}" for option in _options(config)),
        "ram_directory": f"{directory}/{config.run.run_name}",
        "write_files": files,
        "task_commands": _task(config),
        "program_commands": _program(config),
        "srun_options": _OF_SUPERVISORS if _is_elastic(config) else _OF_HOSTS,
        "config_exit_code": errors.CONFIG_EXIT_CODE,
        "max_restarts": config.deploy.max_restarts,
    }
    return template.script("templates/slurm.sh", holes)


def _is_elastic(config: schema.Config) -> bool:
    # A program of the user starts its supervisors itself, if it has any.
    is_ours = program.is_train(config) or bool(config.deploy.maxtext)
    return is_ours and config.elastic.elastic_enabled


def _is_of_user(config: schema.Config) -> bool:
    return bool(program.variables(config))


def _nodes(config: schema.Config) -> int:
    return config.world.hosts // config.slurm.slurm_tasks_per_node


def _check(config: schema.Config) -> None:
    section, world = config.slurm, config.world
    program.check_one(config)
    _check_keys(config)
    names.refuse(
        not _NAME.fullmatch(config.run.run_name),
        f"run_name={config.run.run_name!r} cannot name a job; use letters, digits,"
        " points and hyphens",
    )
    names.refuse(
        world.hardware == "tpu" or world.enable_single_controller,
        "Slurm runs hosts with CPUs and GPUs; set hardware=cpu or hardware=gpu, and"
        " enable_single_controller=false",
    )
    names.refuse(
        world.hosts % section.slurm_tasks_per_node,
        f"hosts={world.hosts} are not divided evenly among nodes with"
        f" slurm_tasks_per_node={section.slurm_tasks_per_node}; set hosts to a"
        " multiple",
    )
    names.refuse(
        _is_elastic(config)
        and (
            _nodes(config) < 2
            or world.slices % _nodes(config)
            or world.hosts % world.slices
        ),
        f"elastic_enabled=true with hosts={world.hosts}, slices={world.slices} and"
        f" slurm_tasks_per_node={section.slurm_tasks_per_node}: an elastic run has"
        " two nodes or more, with the same number of slices each; set slices to a"
        " multiple of the nodes, and hosts to one of slices",
    )
    if _is_elastic(config):
        program.check_maxtext(config)
    names.refuse(
        program.is_train(config) and world.hosts % world.slices,
        f"hosts={world.hosts} cannot be divided evenly among slices={world.slices};"
        " set hosts, which counts those of all slices, to a multiple of slices",
    )
    names.refuse(
        not _TIME.fullmatch(section.slurm_time),
        f"slurm_time={section.slurm_time!r} is no time limit of Slurm; write"
        " 1-12:00:00, 12:30:00 or minutes",
    )
    names.refuse(
        not _DIRECTORY.fullmatch(section.slurm_ram_directory),
        f"slurm_ram_directory={section.slurm_ram_directory!r} is no absolute path;"
        " set it to that of a RAM disk, such as /dev/shm",
    )
    if config.pods.program_memory:
        quantity.check("program_memory", config.pods.program_memory)
        size = config.tiers.local_checkpoint_size_limit
        quantity.check("local_checkpoint_size_limit", size)


def _check_keys(config: schema.Config) -> None:
    of_pods = {field.name for field in dataclasses.fields(config.pods)}
    for section, keys in (
        (config.pods, of_pods.difference(_OF_SLURM)),
        (config.deploy, _OF_KUBERNETES),
    ):
        default = type(section)()
        for key in sorted(keys):
            value = getattr(section, key)
            names.refuse(
                value != getattr(default, key),
                f"{key}={value!r} is for Kubernetes, and Slurm has nothing like it;"
                " unset it, and use slurm_options or slurm_setup",
            )


def _options(config: schema.Config) -> list[str]:
    section, world = config.slurm, config.world
    on_node = section.slurm_tasks_per_node
    # An elastic run has one task on a node, its supervisor.
    tasks, hosts_per_task = (1, on_node) if _is_elastic(config) else (on_node, 1)
    gres = section.slurm_gres
    if not gres and world.hardware == "gpu":
        gres = f"gpu:{on_node * world.devices_per_host}"
    cpus = math.ceil(config.pods.program_cpus * hosts_per_task)
    grace_secs = config.deploy.termination_grace_period_seconds
    values = {
        "job-name": config.run.run_name,
        "nodes": _nodes(config),
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus or "",
        "gres": gres,
        "mem": _memory(config),
        "partition": section.slurm_partition,
        "reservation": config.pods.reservation,
        "account": section.slurm_account,
        "time": section.slurm_time,
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": True,
        # Hosts get SIGTERM before the time limit, and save.
        "signal": f"TERM@{grace_secs}",
        # The run goes on without a node that is lost.
        "no-kill": _is_elastic(config),
        **settings.mapping("slurm_options", section.slurm_options),
    }
    unset: tuple[object, ...] = ("", None, False)
    return [_option(key, value) for key, value in values.items() if value not in unset]


def _option(key: str, value: object) -> str:
    if value is True:
        return f"--{key}"
    names.refuse(
        re.search(r"\s", f"{key}{value}"),
        f"{key}={value!r} has a space, which an option of sbatch cannot have",
    )
    return f"--{key}={value}"


def _memory(config: schema.Config) -> str:
    # Slurm counts files on a RAM disk as memory of the job.
    memory = config.pods.program_memory
    if not memory:
        return ""
    total = quantity.to_bytes(memory) * config.slurm.slurm_tasks_per_node
    if config.tiers.local_checkpoint_directory:
        total += quantity.to_bytes(config.tiers.local_checkpoint_size_limit)
    return f"{math.ceil(total / 2**20)}M"


def _task(config: schema.Config) -> str:
    devices, lines = config.world.devices_per_host, []
    if not _is_elastic(config):
        # JAX would take one device for each task.
        lines += [
            f"first=$((SLURM_LOCALID * {devices}))",
            f"last=$((first + {devices - 1}))",
            'export JAX_LOCAL_DEVICE_IDS="$(seq -s, "$first" "$last")"',
        ]
    for name, value in settings.mapping("pod_env", config.pods.pod_env).items():
        if isinstance(value, dict):
            raise errors.ConfigError(
                f"pod_env has {name} from {value!r}, which only Kubernetes has; export"
                " it in slurm_setup, or from where you call sbatch"
            )
        names.refuse(
            not _VARIABLE.fullmatch(name),
            f"pod_env has {name!r}, which cannot name a variable of a shell; use"
            " letters, digits and underscores",
        )
        lines.append(f"export {name}={shlex.quote(settings.text(value))}")
    port, on_node = config.metrics.prometheus_port, config.slurm.slurm_tasks_per_node
    if port and on_node > 1 and not _is_elastic(config) and not _is_of_user(config):
        # Each task of a node has another port.
        lines.append(f'set -- "$@" "prometheus_port=$(({port} + SLURM_LOCALID))"')
    if config.slurm.slurm_setup:
        lines.append(config.slurm.slurm_setup.rstrip("\n"))
    return "".join(f"{line}\n" for line in lines)


def _program(config: schema.Config) -> str:
    words = [
        f'"$ram"/{word.removeprefix(_RAM)}'
        if word.startswith(_RAM)
        else shlex.quote(word)
        for word in program.command(config, directory=_RAM)
    ]
    is_of_user = _is_of_user(config)
    exports = (
        [f'export {program.CONFIG_VARIABLE}="$ram/config.yml"'] if is_of_user else []
    )
    if config.tiers.local_checkpoint_directory:
        if is_of_user:
            exports.append(f'export {program.LOCAL_VARIABLE}="$ram/steps"')
        else:
            words.append('"local_checkpoint_directory=$ram/steps"')
    if _is_elastic(config):
        words += [
            '"elastic_machines=$SLURM_JOB_NUM_NODES"',
            f"hosts={config.world.hosts}",
        ]
    return "\n".join([*exports, f"program=({' '.join(words)})"])
