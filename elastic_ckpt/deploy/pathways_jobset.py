"""The JobSet of Pathways: one head, and workers with the colocated-Python sidecar.

`pathwaysutils` builds the JobSet; this module adds the program, the sidecar and their
volumes. The head's pod runs the program beside the resource manager and the proxy. A
worker's pod has the Pathways server and the sidecar, which mounts the RAM disk.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import job, names

_HEAD, _WORKER = "pathways-head", "pathways-worker"
# The container of a worker's pod in which the host saves and reads checkpoints.
_SIDECAR = "colocated-python-sidecar"


def documents(config: schema.Config) -> list[job.Object]:
    """The head's configuration and the JobSet, in this order.

    Raises:
      ConfigError: if a value is invalid, or the extra `pathways` is not installed.
    """
    _check(config)
    host = job.check(config)
    counts = {_HEAD: (1, 1), _WORKER: (config.world.slices, host.hosts_per_slice)}
    names.check_jobset_name(config.run.run_name, counts)
    return [job.config_map(config), _jobset(config)]


def _check(config: schema.Config) -> None:
    deploy, world = config.deploy, config.world
    if world.hardware != "tpu":
        raise errors.ConfigError(
            f"enable_single_controller=true with hardware={world.hardware}: Pathways"
            " supports only TPUs; set hardware=tpu, or enable_single_controller=false"
        )
    sidecar_image = deploy.colocated_python_sidecar_image
    names.check_image("colocated_python_sidecar_image", sidecar_image)
    names.check_image("server_image", deploy.server_image)
    names.check_image("proxy_server_image", deploy.proxy_server_image)
    names.check_name("pathways_head_node_pool", deploy.pathways_head_node_pool)
    if not _scratch(config).startswith("gs://"):
        raise errors.ConfigError(
            f"pathways_gcs_location={_scratch(config)!r} is not in a bucket; set"
            " pathways_gcs_location=gs://bucket/path"
        )


def _scratch(config: schema.Config) -> str:
    directory = config.run.base_output_directory.rstrip("/")
    return config.deploy.pathways_gcs_location or f"{directory}/pathways"


def _jobset(config: schema.Config) -> job.Object:
    try:
        from kubernetes import client
        from pathwaysutils.experimental.gke import jobset
    except ImportError as error:
        raise errors.ConfigError(
            "enable_single_controller=true needs the extra `pathways`"
            f" ({error.name} is missing): pip install 'elastic-ckpt[pathways]'"
        ) from None

    deploy = config.deploy
    built = jobset.PathwaysJobSet(
        name=config.run.run_name,
        namespace=deploy.namespace,
        pathways_dir=_scratch(config),
        tpu_type=deploy.machine_type,
        topology=deploy.topology,
        num_slices=config.world.slices,
        max_restarts=deploy.max_restarts,
        pathways_rm_and_worker_image=deploy.server_image,
        pathways_proxy_image=deploy.proxy_server_image,
        head_pod_spec_kwargs=_head_pod(config),
        worker_pod_spec_kwargs=_worker_pod(config),
    )
    built.add_user_workload(
        image=deploy.docker_image,
        command=job.COMMAND,
        name=job.CONTAINER,
        termination_message_policy=job.TERMINATION_MESSAGE_POLICY,
        volume_mounts=[
            client.V1VolumeMount(
                name=job.CONFIG, mount_path=job.CONFIG_DIRECTORY, read_only=True
            )
        ],
    )
    built.add_colocated_python(
        image=deploy.colocated_python_sidecar_image,
        shm_size_limit=deploy.shared_memory_size_limit,
        volume_mounts=[
            client.V1VolumeMount(name=part.name, mount_path=part.path)
            for part in job.host_memory(config)
        ],
    )
    return _with_environment(built.to_dict())


def _with_environment(jobset: job.Object) -> job.Object:
    # pathwaysutils accepts only variables with literal values.
    for replicated in jobset["spec"]["replicatedJobs"]:
        pod = replicated["template"]["spec"]["template"]["spec"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            if container["name"] in (job.CONTAINER, _SIDECAR):
                container["env"] += job.environment()
    return jobset


def _head_pod(config: schema.Config) -> job.Object:
    from kubernetes import client

    source = client.V1ConfigMapVolumeSource(name=config.run.run_name)
    return {
        **_pod(config.deploy),
        "node_selector": {job.NODE_POOL: config.deploy.pathways_head_node_pool},
        "volumes": [client.V1Volume(name=job.CONFIG, config_map=source)],
    }


def _worker_pod(config: schema.Config) -> job.Object:
    from kubernetes import client

    volumes = [
        client.V1Volume(
            name=part.name,
            empty_dir=client.V1EmptyDirVolumeSource(
                medium="Memory", size_limit=part.size_limit
            ),
        )
        for part in job.host_memory(config)
    ]
    return {**_pod(config.deploy), "volumes": volumes}


def _pod(deploy: schema.DeploySection) -> job.Object:
    secs = deploy.termination_grace_period_seconds
    pod: job.Object = {"termination_grace_period_seconds": secs}
    if deploy.service_account:
        pod["service_account_name"] = deploy.service_account
    return pod
