"""The JobSet of Pathways: one head, and workers with the colocated-Python sidecar.

`pathwaysutils` builds the JobSet; this module adds the program, the sidecar and their
volumes. The head's pod runs the program beside the resource manager and the proxy. A
worker's pod has the Pathways server and the sidecar, which mounts the RAM disk.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.core import errors, extras
from elastic_ckpt.deploy import names
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema

HEAD, WORKER = "pathways-head", "pathways-worker"
SIDECAR = "colocated-python-sidecar"
# The label of a GKE node that names its node pool.
NODE_POOL = "cloud.google.com/gke-nodepool"
# The fields of volumes, as the client of Kubernetes names them.
_FIELDS = {"emptyDir": "empty_dir", "hostPath": "host_path"}


def check(config: schema.Config) -> None:
    """Raises a ConfigError if Pathways cannot run `config`."""
    deploy, world = config.deploy, config.world
    if world.hardware != "tpu":
        raise errors.ConfigError(
            f"enable_single_controller=true with hardware={world.hardware}: Pathways"
            " supports only TPUs; set hardware=tpu, or enable_single_controller=false"
        )
    for key in ("colocated_python_sidecar_image", "server_image", "proxy_server_image"):
        names.check_image(key, getattr(deploy, key))
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


def jobset(config: schema.Config, values: Object) -> Object:
    """The JobSet, without the settings of its pods.

    Args:
      config: of the run.
      values: of the holes of `templates/jobset.yaml`.

    Raises:
      ConfigError: if the extra `pathways` is not installed.
    """
    client, pathways = _libraries()
    deploy = config.deploy
    variables = {
        variable["name"]: variable.get("value")
        or client.V1EnvVarSource(field_ref=variable["valueFrom"]["fieldRef"])
        for variable in values["place_variables"]
    }
    pod = {
        "termination_grace_period_seconds": deploy.termination_grace_period_seconds,
        "service_account_name": deploy.service_account or None,
    }
    files = client.V1Volume(name="config", config_map={"name": config.run.run_name})
    memory = [v for v in (values["ram_disk"], values["shared_memory"]) if v]
    head = {
        **pod,
        "node_selector": {NODE_POOL: deploy.pathways_head_node_pool},
        "volumes": [files],
    }
    workers = {
        **pod,
        "volumes": [
            client.V1Volume(**{_FIELDS.get(k, k): v for k, v in volume.items()})
            for volume in memory
        ],
    }
    mounts = [values["ram_disk_mount"], {"name": "dshm", "mountPath": "/dev/shm"}]
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
    directory = {"mountPath": "/etc/elastic-ckpt", "name": "config", "readOnly": True}
    built.add_user_workload(
        image=deploy.docker_image,
        command=values["command"],
        name="train",
        termination_message_policy="FallbackToLogsOnError",
        env=variables,
        volume_mounts=[directory],
    )
    built.add_colocated_python(
        image=deploy.colocated_python_sidecar_image,
        shm_size_limit=deploy.shared_memory_size_limit,
        env=variables,
        volume_mounts=[mount for mount in mounts if mount],
    )
    return built.to_dict()
