"""Direct connections of the GPUs of several hosts, by the machine type.

The pods are set up as Google's examples are (GoogleCloudPlatform/
container-engine-accelerators, of June 2026): `gpudirect-tcpx/nccl-test-latest.yaml`
for A3 High, `gpudirect-tcpxo/` of the release of 9 January 2026 for A3 Mega, with the
sidecar and the probe of its `best-practice.md`, and `gpudirect-rdma/nccl-test.yaml`
with gIB 1.1 for A3 Ultra and A4. The cluster needs the networks, and the installer and
the device injector of the NCCL plugin, which those examples install.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition

_REGISTRY = "us-docker.pkg.dev/gce-ai-infra"
_LIBRARIES = "/usr/local/nvidia/lib64"
_DEVICES = (*(f"/dev/nvidia{gpu}" for gpu in range(8)), "/dev/nvidiactl")
# The cores of an A3 High machine near each of its interfaces.
_NEAR = ("8-21,112-125", "8-21,112-125", "60-73,164-177", "60-73,164-177")
_NEAR_RX = ("22-35,126-139", "22-35,126-139", "74-87,178-191", "74-87,178-191")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Method:
    """How the GPUs of a machine are connected.

    Attributes:
      networks: the names in Google's guides, in the order of the interfaces.
      first: the number of the interface of the first of them.
      daemon: the name of the sidecar that owns the interfaces; empty for none.
      profile: a script with the settings of NCCL, which the installer brings.
      volumes: a directory of the node, and where the program has it, by a name.
    """

    networks: tuple[str, ...]
    first: int
    daemon: str = ""
    profile: str = ""
    volumes: dict[str, tuple[str, str]]


_TCPX = _Method(
    networks=tuple(f"vpc{number}" for number in range(1, 5)),
    first=1,
    daemon="tcpx-daemon",
    volumes={
        "gpu-libraries": ("/home/kubernetes/bin/nvidia/lib64", _LIBRARIES),
        "tcpx-socket": ("/run/tcpx", "/run/tcpx"),
    },
)
_TCPXO = _Method(
    networks=tuple(f"vpc{number}" for number in range(1, 9)),
    first=1,
    daemon="tcpxo-daemon",
    profile=f"{_LIBRARIES}/nccl-env-profile.sh",
    volumes={
        "gpu-libraries": ("/home/kubernetes/bin/nvidia/lib64", _LIBRARIES),
        "aperture-devices": ("/dev/aperture_devices", "/dev/aperture_devices"),
    },
)
_RDMA = _Method(
    networks=tuple(f"rdma-{number}" for number in range(8)),
    first=2,
    profile="/usr/local/gib/scripts/set_nccl_env.sh",
    volumes={
        "gpu-libraries": ("/home/kubernetes/bin/nvidia", "/usr/local/nvidia"),
        "gib": ("/home/kubernetes/bin/gib", "/usr/local/gib"),
    },
)
_METHODS = {
    "a3-highgpu-8g": _TCPX,
    "a3-megagpu-8g": _TCPXO,
    "a3-ultragpu-8g": _RDMA,
    "a4-highgpu-8g": _RDMA,
}


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the machines have no direct connections."""
    deploy, pods = config.deploy, config.pods
    if not pods.gpu_direct:
        return
    if config.world.hardware != "gpu" or deploy.machine_type not in _METHODS:
        raise errors.ConfigError(
            f"gpu_direct=true with hardware={config.world.hardware} and"
            f" machine_type={deploy.machine_type}: only {', '.join(_METHODS)} have it"
        )
    if pods.host_network:
        raise errors.ConfigError(
            "gpu_direct=true with host_network=true: the interfaces of GPUs are"
            " networks of the pod; set host_network=false"
        )
    method = _METHODS[deploy.machine_type]
    if len(_networks(pods, method)) != len(method.networks):
        raise errors.ConfigError(
            f"gpu_direct_networks={pods.gpu_direct_networks!r}: a host of"
            f" machine_type={deploy.machine_type} has {len(method.networks)} networks;"
            f" separate their names by ;"
        )


def command(config: schema.Config, arguments: list[str]) -> list[str]:
    """`arguments`, after the settings of NCCL that the node has for its plugin."""
    method = _METHODS.get(config.deploy.machine_type)
    if not config.pods.gpu_direct or method is None or not method.profile:
        return arguments
    return ["bash", "-c", f'source {method.profile} && exec "$@"', "--", *arguments]


def addition_for(config: schema.Config) -> addition.Addition:
    """The network, devices and libraries of GPU hosts."""
    if not config.pods.gpu_direct:
        return addition.Addition()
    method = _METHODS[config.deploy.machine_type]
    volumes = [_host_path(name, path) for name, (path, _) in method.volumes.items()]
    spec: dict[str, Any] = {"volumes": volumes}
    if method.daemon:
        spec["volumes"] += [
            _host_path("sys", "/sys"),
            _host_path("proc-sys", "/proc/sys"),
        ]
        spec["initContainers"] = [_daemon(method)]
    return addition.Addition(
        annotations=_annotations(config.pods, method),
        spec=spec,
        container={
            "env": [{"name": n, "value": v} for n, v in _variables(method).items()],
            "volumeMounts": [
                {"name": name, "mountPath": path}
                for name, (_, path) in method.volumes.items()
            ],
        },
    )


def _networks(pods: schema.PodsSection, method: _Method) -> tuple[str, ...]:
    names = tuple(name.strip() for name in pods.gpu_direct_networks.split(";"))
    return names if pods.gpu_direct_networks else method.networks


def _host_path(name: str, path: str) -> addition.Object:
    return {"name": name, "hostPath": {"path": path}}


def _annotations(pods: schema.PodsSection, method: _Method) -> dict[str, str]:
    interfaces = [{"interfaceName": "eth0", "network": "default"}]
    interfaces += [
        {"interfaceName": f"eth{number}", "network": network}
        for number, network in enumerate(_networks(pods, method), method.first)
    ]
    lines = ",\n".join(f"  {json.dumps(each)}" for each in interfaces)
    annotations = {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": f"[\n{lines}\n]\n",
    }
    if method.daemon:
        paths = (*_DEVICES, "/dev/nvidia-uvm")
        if method is _TCPXO:
            paths = (*paths, "/dev/dmabuf_import_helper")
        devices = "".join(f"- path: {path}\n" for path in paths)
        annotations[f"devices.gke.io/container.{method.daemon}"] = devices
    return annotations


def _variables(method: _Method) -> dict[str, str]:
    variables = {"LD_LIBRARY_PATH": _LIBRARIES}
    if method is _TCPXO:
        variables |= {
            "NCCL_LIB_DIR": _LIBRARIES,
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        }
    if method is _TCPX:
        variables |= _tcpx_variables()
    return variables


def _tcpx_variables() -> dict[str, str]:
    # From gpudirect-tcpx/nccl-config.yaml; that plugin has no script with them.
    interfaces = [f"eth{number}" for number in range(1, 5)]

    def bindings(cores: tuple[str, ...]) -> str:
        return ";".join(f"{i}:{c}" for i, c in zip(interfaces, cores, strict=True))

    prefix = "NCCL_GPUDIRECTTCPX"
    return {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_ALGO": "Ring,Tree",
        "NCCL_PROTO": "Simple",
        "NCCL_CROSS_NIC": "0",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_PXN_LEVEL": "0",
        "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "NCCL_P2P_PCI_CHUNKSIZE": "524288",
        "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "1",
        f"{prefix}_SOCKET_IFNAME": ",".join(interfaces),
        f"{prefix}_CTRL_DEV": "eth0",
        f"{prefix}_TX_BINDINGS": bindings(_NEAR),
        f"{prefix}_RX_BINDINGS": bindings(_NEAR_RX),
        f"{prefix}_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
        f"{prefix}_UNIX_CLIENT_PREFIX": "/run/tcpx",
    }


def _daemon(method: _Method) -> addition.Object:
    # As an init container that restarts it starts before the program, and ends with it.
    mounts = [
        {"name": "gpu-libraries", "mountPath": _LIBRARIES},
        {"name": "sys", "mountPath": "/hostsysfs"},
        {"name": "proc-sys", "mountPath": "/hostprocsysfs"},
    ]
    libraries = {"name": "LD_LIBRARY_PATH", "value": _LIBRARIES}
    if method is _TCPX:
        return {
            "name": method.daemon,
            "image": f"{_REGISTRY}/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
            "restartPolicy": "Always",
            "command": [
                "/tcpgpudmarxd/build/app/tcpgpudmarxd",
                *("--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd"),
                *("--uds_path", "/run/tcpx"),
                # The quotes are part of the argument.
                *("--setup_param", '\\"--verbose 128 2 0 \\"'),
            ],
            "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}},
            "volumeMounts": [
                *mounts,
                {"name": "tcpx-socket", "mountPath": "/run/tcpx"},
            ],
            "env": [libraries],
        }
    ready = "/run/health-check"
    return {
        "name": method.daemon,
        "image": f"{_REGISTRY}/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c"],
        "args": [
            "set -ex\n"
            "chmod 755 /fts/entrypoint_rxdm_container.sh\n"
            "/fts/entrypoint_rxdm_container.sh --num_hops=2\n"
        ],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
        "volumeMounts": mounts,
        "env": [libraries, {"name": "HEALTH_CHECK_LOG_FILE", "value": ready}],
        "startupProbe": {
            "exec": {"command": ["cat", ready]},
            "periodSeconds": 5,
            "failureThreshold": 24,
        },
    }
