"""What a manifest refuses: values that could not run, each with what to set instead."""

from __future__ import annotations

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.deploy import (
    gpu_network,
    machine,
    monitoring,
    names,
    program,
    quantity,
    volumes,
)
from elastic_ckpt.training import schema

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(config: schema.Config) -> machine.Machine:
    """Checks what all runs have in common, and returns the kind of host they require.

    Raises:
      ConfigError: if a value is invalid, or batches do not divide among the hosts.
    """
    deploy, pods = config.deploy, config.pods
    names.check_image("docker_image", deploy.docker_image)
    names.check_name("namespace", deploy.namespace)
    _names(config)
    _sizes(config)
    _restarts(config)
    program.check_one(config)
    is_train = program.is_train(config)
    if is_train or deploy.maxtext:
        volumes.check_shared(config)
    names.refuse(
        pods.spot and pods.reservation,
        f"spot=true with reservation={pods.reservation}: Spot VMs cannot be"
        " reserved; set only one of the two",
    )
    _metrics(config)
    _gpu_direct(config)
    host = machine.from_config(config)
    has_supervisors = program.has_supervisors(config)
    if has_supervisors:
        _supervisors(config, host)
    if is_train:
        hosts = config.world.slices * host.hosts_per_slice
        # A pod with a supervisor has several hosts.
        on_pod = 0 if has_supervisors else host.devices
        devices = hosts * (on_pod or config.world.devices_per_host)
        slices = config.world.slices
        world = topology.Topology(hosts=hosts, slices=slices, devices=devices)
        batch_size.schedule(config.data, world)
    return host


def multicontroller(config: schema.Config, host: machine.Machine) -> None:
    """Raises a ConfigError if the hosts of a run cannot each run the program."""
    deploy, world = config.deploy, config.world
    names.refuse(
        world.hardware == "tpu" and world.slices > 1 and host.hosts_per_slice == 1,
        f"slices={world.slices} of topology={deploy.topology} on"
        f" machine_type={deploy.machine_type} have one host each, but GKE connects"
        " only slices of several hosts; choose a larger topology, or set"
        " enable_single_controller=true",
    )
    wrong = host.devices and world.devices_per_host != host.devices
    names.refuse(
        config.data.colocated_python_data_input and wrong,
        f"devices_per_host={world.devices_per_host}: a host of"
        f" machine_type={deploy.machine_type} has {host.devices} devices, and"
        " colocated Python needs as many CPU devices; set"
        f" devices_per_host={host.devices}",
    )


def backup_hosts(config: schema.Config) -> None:
    """Raises a ConfigError if the run cannot have backup hosts, but is to."""
    deploy, tiers = config.deploy, config.tiers
    if not deploy.backup_hosts:
        return
    quantity.check("backup_size_limit", deploy.backup_size_limit)
    names.check_mount("local_checkpoint_directory", tiers.local_checkpoint_directory)
    strategy = deploy.restart_strategy
    names.refuse(
        not program.has_supervisors(config) and strategy != "restart_job",
        f"backup_hosts={deploy.backup_hosts} with restart_strategy={strategy}:"
        " backup hosts would be made anew, without their memory, with all pods; set"
        " elastic_enabled=true, or on TPUs restart_strategy=restart_job",
    )
    names.refuse(
        program.is_train(config) and not tiers.enable_multi_tier_checkpointing,
        f"backup_hosts={deploy.backup_hosts} with"
        " enable_multi_tier_checkpointing=false: there would be no steps in memory"
        " for them to hold; set enable_multi_tier_checkpointing=true",
    )
    names.refuse(
        tiers.peer_backup_urls,
        f"peer_backup_urls={tiers.peer_backup_urls!r}: the pods of backup_hosts"
        " have names of their JobSet; leave it empty",
    )
    names.refuse(
        not tiers.peer_secret_file,
        f"backup_hosts={deploy.backup_hosts} needs peer_secret_file: mount a Secret"
        " with pod_volumes, and name its file",
    )


def node_agent(config: schema.Config, image: str) -> None:
    """Raises a ConfigError if nodes cannot have agents of `image`."""
    deploy = config.deploy
    names.check_image("node_agent_image", image)
    directory = config.tiers.local_checkpoint_directory
    names.check_mount("local_checkpoint_directory", directory)
    if deploy.node_agent_priority_class:
        name = deploy.node_agent_priority_class
        names.check_name("node_agent_priority_class", name, dots=True)
    limit, run_limit = (
        deploy.node_agent_size_limit,
        config.tiers.local_checkpoint_size_limit,
    )
    if not limit:
        return
    quantity.check("node_agent_size_limit", limit)
    names.refuse(
        quantity.to_bytes(limit) < quantity.to_bytes(run_limit),
        f"node_agent_size_limit={limit} is below"
        f" local_checkpoint_size_limit={run_limit}, and holds for all runs on a"
        " node together; raise it, or lower that of the run",
    )


def fit(
    config: schema.Config, host: machine.Machine, cpus: float, memory_bytes: int
) -> None:
    """Raises a ConfigError if a pod requests more than its host has."""
    machine_type = config.deploy.machine_type
    names.refuse(
        host.memory_gib is not None and memory_bytes > host.memory_gib * 2**30,
        f"a pod requests {quantity.of_bytes(memory_bytes)} of memory, that of its"
        f" program and of all volumes in memory, and machine_type={machine_type}"
        f" has {host.memory_gib}Gi; lower program_memory, sidecar_memory,"
        " local_checkpoint_size_limit or shared_memory_size_limit",
    )
    names.refuse(
        host.cpus is not None and cpus > host.cpus,
        f"a pod requests {cpus:g} CPUs, and machine_type={machine_type} has"
        f" {host.cpus}; lower program_cpus or sidecar_cpus",
    )


def _names(config: schema.Config) -> None:
    deploy, pods = config.deploy, config.pods
    for key, value in (
        ("service_account", deploy.service_account),
        ("pod_priority_class", pods.pod_priority_class),
    ):
        if value:
            names.check_name(key, value, dots=True)
    for part in pods.reservation.split("/") if pods.reservation else ():
        names.check_name("reservation", part)
    if deploy.kueue_queue:
        names.check_name("kueue_queue", deploy.kueue_queue)


def _sizes(config: schema.Config) -> None:
    deploy, tiers = config.deploy, config.tiers
    if tiers.local_checkpoint_directory:
        directory = tiers.local_checkpoint_directory
        names.check_mount("local_checkpoint_directory", directory)
        size = tiers.local_checkpoint_size_limit
        quantity.check("local_checkpoint_size_limit", size)
        if deploy.local_checkpoint_volume == "node_agent":
            names.check_mount("node_agent_directory", deploy.node_agent_directory)
    quantity.check("shared_memory_size_limit", deploy.shared_memory_size_limit)
    for key in ("program_memory", "sidecar_memory"):
        if value := getattr(config.pods, key):
            quantity.check(key, value)


def _restarts(config: schema.Config) -> None:
    strategy, world = config.deploy.restart_strategy, config.world
    if strategy == "recreate":
        return
    names.refuse(
        world.enable_single_controller,
        f"restart_strategy={strategy} with enable_single_controller=true: the head"
        " of Pathways starts again with all of its workers; set"
        " restart_strategy=recreate",
    )
    names.refuse(
        program.has_supervisors(config),
        f"restart_strategy={strategy} with elastic_enabled=true: the supervisors"
        " restart hosts, and a pod that fails is replaced alone; set"
        " restart_strategy=recreate",
    )
    if strategy == "in_place":
        image = config.deploy.in_place_restart_image
        names.check_image("in_place_restart_image", image)
    names.refuse(
        strategy == "restart_job" and world.hardware != "tpu",
        f"restart_strategy=restart_job with hardware={world.hardware}: all hosts"
        " are one Job, so that nothing else would go on; set"
        " restart_strategy=in_place or recreate",
    )


def _metrics(config: schema.Config) -> None:
    """Metrics that something reads have to be reachable."""
    metrics = config.metrics
    wanted = [
        f"pod_{probe}_probe"
        for probe in ("startup", "liveness")
        if monitoring.reads_metrics(config, probe)
    ]
    if wanted and program.has_supervisors(config):
        raise errors.ConfigError(
            f"{wanted[0]} reads metrics, which hosts serve; with elastic_enabled=true"
            " the hosts of a pod come and go while the pod stays; write a check of"
            " yours, such as {exec: {command: [test, -e, /tmp/ready]}}"
        )
    if config.deploy.metrics_monitor != "none":
        wanted.insert(0, "metrics_monitor")
    missing = []
    if not metrics.prometheus_port:
        missing.append("prometheus_port=9400")
    is_ours = program.is_train(config) or config.deploy.maxtext
    if is_ours and metrics.prometheus_interface in _LOOPBACK:
        missing.append("prometheus_interface=0.0.0.0")
    if wanted and missing:
        raise errors.ConfigError(
            f"{wanted[0]} reads metrics from outside of the pod, which serves none"
            f" there; set {' and '.join(missing)}"
        )


def _gpu_direct(config: schema.Config) -> None:
    deploy, pods, methods = config.deploy, config.pods, gpu_network.METHODS
    if not pods.gpu_direct:
        return
    names.refuse(
        config.world.hardware != "gpu" or deploy.machine_type not in methods,
        f"gpu_direct=true with hardware={config.world.hardware} and"
        f" machine_type={deploy.machine_type}: only {', '.join(methods)} have it",
    )
    names.refuse(
        pods.host_network,
        "gpu_direct=true with host_network=true: the interfaces of GPUs are"
        " networks of the pod; set host_network=false",
    )
    number = len(methods[deploy.machine_type]["networks"])
    names.refuse(
        len(gpu_network.networks(config)) != number,
        f"gpu_direct_networks={pods.gpu_direct_networks!r}: a host of"
        f" machine_type={deploy.machine_type} has {number} networks; separate their"
        " names by ;",
    )


def _supervisors(config: schema.Config, host: machine.Machine) -> None:
    world = config.world
    names.refuse(
        world.hardware == "tpu",
        "elastic_enabled=true with hardware=tpu: supervisors start hosts on CPUs"
        " and GPUs; set enable_single_controller=true, or elastic_enabled=false",
    )
    program.check_maxtext(config)
    names.refuse(
        config.elastic.elastic_machines > 1,
        f"elastic_machines={config.elastic.elastic_machines}: each slice is a pod;"
        " leave it out",
    )
    names.refuse(
        world.slices < 2,
        f"elastic_enabled=true with slices={world.slices}: each slice is a pod,"
        " and when one is lost the run needs another to continue on; set slices to"
        " 2 or more, and hosts to a multiple of it",
    )
    devices = host.hosts_per_slice * world.devices_per_host
    names.refuse(
        host.devices and devices != host.devices,
        f"devices_per_host={world.devices_per_host} with hosts={world.hosts} in"
        f" slices={world.slices}: the hosts of a pod use {devices} devices, and"
        f" machine_type={config.deploy.machine_type} has {host.devices}; set"
        f" hosts={world.slices} and devices_per_host={host.devices}",
    )
