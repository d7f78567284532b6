"""The JobSet of Pathways: one head, and workers with the colocated-Python sidecar.

`pathwaysutils` builds the JobSet; `templates/pathways.yaml` has what it does not know
of its pods. The head's pod runs the program beside the resource manager and the proxy.
A worker's pod has the Pathways server and the sidecar, which mounts the RAM disk.
"""

from __future__ import annotations

from elastic_ckpt.core import errors, extras
from elastic_ckpt.deploy import names
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema

HEAD, WORKER = "pathways-head", "pathways-worker"
SIDECAR = "colocated-python-sidecar"
# The label of a GKE node that names its node pool.
NODE_POOL = "cloud.google.com/gke-nodepool"


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


def jobset(config: schema.Config, command: list[str]) -> Object:
    """The JobSet, without what `templates` add to its pods.

    Args:
      config: of the run.
      command: of the program, in the head.

    Raises:
      ConfigError: if the extra `pathways` is not installed.
    """
    try:
        from pathwaysutils.experimental.gke import jobset as pathways
    except ImportError as error:
        raise errors.ConfigError(
            "enable_single_controller=true needs the extra `pathways`"
            f" ({error.name} is missing); install it, {extras.hint('pathways')}"
        ) from None
    deploy = config.deploy
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
    )
    built.add_user_workload(image=deploy.docker_image, command=command, name="train")
    built.add_colocated_python(
        image=deploy.colocated_python_sidecar_image,
        shm_size_limit=deploy.shared_memory_size_limit,
    )
    filled: Object = built.to_dict()
    return filled
