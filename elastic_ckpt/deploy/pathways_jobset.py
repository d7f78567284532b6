"""The JobSet of Pathways: one head, and workers with the colocated-Python sidecar.

`pathwaysutils` builds the JobSet; this module adds the program, the sidecar and their
volumes. The head's pod runs the program beside the resource manager and the proxy. A
worker's pod has the Pathways server and the sidecar, which mounts the RAM disk.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, extras
from elastic_ckpt.deploy import environment, job, jobset, names, program
from elastic_ckpt.deploy.addition import Object

_HEAD, _WORKER = "pathways-head", "pathways-worker"
_SIDECAR = "colocated-python-sidecar"
# The fields of volumes, as the client of Kubernetes names them.
_FIELDS = {
    "name": "name",
    "emptyDir": "empty_dir",
    "hostPath": "host_path",
    "csi": "csi",
}


def documents(config: schema.Config) -> list[Object]:
    """The head's configuration and the JobSet, in this order.

    Raises:
      ConfigError: if a value is invalid, or the extra `pathways` is not installed.
    """
    _check(config)
    host = job.check(config)
    counts = {_HEAD: (1, 1), _WORKER: (config.world.slices, host.hosts_per_slice)}
    names.check_jobset_name(config.run.run_name, counts)
    programs: jobset.Programs = {
        _HEAD: ("head", job.CONTAINER),
        _WORKER: ("worker", _SIDECAR),
    }
    built = jobset.completed(config, _jobset(config), programs)
    return [job.config_map(config), *built]


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


def _libraries() -> tuple[Any, Any]:
    try:
        from kubernetes import client
        from pathwaysutils.experimental.gke import jobset
    except ImportError as error:
        raise errors.ConfigError(
            "enable_single_controller=true needs the extra `pathways`"
            f" ({error.name} is missing); install it, {extras.hint('pathways')}"
        ) from None
    return client, jobset


def _jobset(config: schema.Config) -> Object:
    client, pathways = _libraries()
    deploy = config.deploy
    volumes, mounts = job.host_memory(config)
    variables = {
        variable["name"]: variable.get("value")
        or client.V1EnvVarSource(field_ref=variable["valueFrom"]["fieldRef"])
        for variable in environment.place_variables()
    }
    pod = {
        "termination_grace_period_seconds": deploy.termination_grace_period_seconds,
        "service_account_name": deploy.service_account or None,
    }
    configuration = job.config_volume(config)
    head = {
        **pod,
        "node_selector": {job.NODE_POOL: deploy.pathways_head_node_pool},
        "volumes": [
            client.V1Volume(
                name=configuration["name"], config_map=configuration["configMap"]
            )
        ],
    }
    workers = {
        **pod,
        "volumes": [
            client.V1Volume(**{_FIELDS[key]: value for key, value in volume.items()})
            for volume in volumes
        ],
    }
    built = pathways.PathwaysJobSet(
        name=config.run.run_name,
        namespace=deploy.namespace,
        pathways_dir=_scratch(config),
        tpu_type=deploy.machine_type,
        topology=deploy.topology,
        num_slices=config.world.slices,
        max_restarts=deploy.max_restarts,
        pathways_rm_and_worker_image=deploy.server_image,
        pathways_proxy_image=deploy.proxy_server_image,
        head_pod_spec_kwargs=head,
        worker_pod_spec_kwargs=workers,
    )
    built.add_user_workload(
        image=deploy.docker_image,
        command=program.command(config),
        name=job.CONTAINER,
        termination_message_policy=job.TERMINATION_MESSAGE_POLICY,
        env=variables,
        volume_mounts=[job.CONFIG_MOUNT],
    )
    built.add_colocated_python(
        image=deploy.colocated_python_sidecar_image,
        shm_size_limit=deploy.shared_memory_size_limit,
        env=variables,
        volume_mounts=mounts,
    )
    return built.to_dict()
