"""Direct connections of GPUs, compared with Google's examples.

The expected values are those of GoogleCloudPlatform/container-engine-accelerators
(June 2026): gpudirect-tcpx/nccl-test-latest.yaml, gpudirect-tcpxo/nccl-test-latest.yaml
and gpudirect-rdma/nccl-test.yaml.
"""

import json

import pytest

from elastic_ckpt.core import errors
from tests.deploy import jobsets, manifest_check

INTERFACES = {
    "a3-highgpu-8g": {f"eth{n}": f"vpc{n}" for n in range(1, 5)},
    "a3-megagpu-8g": {f"eth{n}": f"vpc{n}" for n in range(1, 9)},
    "a3-ultragpu-8g": {f"eth{n + 2}": f"rdma-{n}" for n in range(8)},
    "a4-highgpu-8g": {f"eth{n + 2}": f"rdma-{n}" for n in range(8)},
}
DAEMONS = {"a3-highgpu-8g": "tcpx-daemon", "a3-megagpu-8g": "tcpxo-daemon"}
PATHS = {
    "a3-highgpu-8g": {
        "/usr/local/nvidia/lib64": "/home/kubernetes/bin/nvidia/lib64",
        "/run/tcpx": "/run/tcpx",
    },
    "a3-megagpu-8g": {
        "/usr/local/nvidia/lib64": "/home/kubernetes/bin/nvidia/lib64",
        "/dev/aperture_devices": "/dev/aperture_devices",
    },
    "a3-ultragpu-8g": {
        "/usr/local/nvidia": "/home/kubernetes/bin/nvidia",
        "/usr/local/gib": "/home/kubernetes/bin/gib",
    },
}
PATHS["a4-highgpu-8g"] = PATHS["a3-ultragpu-8g"]


def host(machine_type, **settings):
    settings = {"machine_type": machine_type, "gpu_direct": True, **settings}
    assert manifest_check.problems(jobsets.documents(jobsets.GPU, **settings)) == []
    return jobsets.roles(jobsets.GPU, **settings)["host"]


def interfaces(template):
    annotations = template["metadata"]["annotations"]
    listed = json.loads(annotations["networking.gke.io/interfaces"])
    return {each["interfaceName"]: each["network"] for each in listed}


@pytest.mark.parametrize("machine_type", INTERFACES)
def test_a_host_has_the_interfaces_and_directories_of_its_machine(machine_type):
    template, container = host(machine_type)
    expected = {"eth0": "default", **INTERFACES[machine_type]}
    assert interfaces(template) == expected
    sources = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in template["spec"]["volumes"]
        if "hostPath" in volume
    }
    mounted = {
        mount["mountPath"]: sources[mount["name"]]
        for mount in container["volumeMounts"]
        if mount["name"] in sources
    }
    assert mounted == PATHS[machine_type]
    assert {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"} in container[
        "env"
    ]


@pytest.mark.parametrize(("machine_type", "name"), DAEMONS.items())
def test_the_daemon_of_the_interfaces_begins_before_the_program(machine_type, name):
    template, _ = host(machine_type)
    (daemon,) = template["spec"]["initContainers"]
    assert daemon["name"] == name
    # As a sidecar it also ends after the program.
    assert daemon["restartPolicy"] == "Always"
    devices = template["metadata"]["annotations"][f"devices.gke.io/container.{name}"]
    assert "- path: /dev/nvidia7\n" in devices
    assert ("dmabuf_import_helper" in devices) == (name == "tcpxo-daemon")


@pytest.mark.parametrize(
    ("machine_type", "script"),
    [
        ("a3-highgpu-8g", None),
        ("a3-megagpu-8g", "/usr/local/nvidia/lib64/nccl-env-profile.sh"),
        ("a4-highgpu-8g", "/usr/local/gib/scripts/set_nccl_env.sh"),
    ],
)
def test_the_program_has_the_settings_of_its_nccl_plugin(machine_type, script):
    _, container = host(machine_type, command="python train.py")
    *shell, name, file = container["command"]
    assert (name, file) == ("python", "train.py")
    expected = ["bash", "-c", f'source {script} && exec "$@"', "--"] if script else []
    assert shell == expected
    names = {variable["name"] for variable in container["env"]}
    assert ("NCCL_GPUDIRECTTCPX_CTRL_DEV" in names) == (script is None)


def test_the_networks_of_a_cluster_may_have_other_names():
    names = [f"gpu-{n}" for n in range(8)]
    template, _ = host("a3-megagpu-8g", gpu_direct_networks=";".join(names))
    assert [*interfaces(template).values()] == ["default", *names]


def test_without_the_key_no_host_has_them():
    for machine_type in INTERFACES:
        template, _ = jobsets.roles(jobsets.GPU, machine_type=machine_type)["host"]
        assert "metadata" not in template
        assert "initContainers" not in template["spec"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"machine_type": "a2-highgpu-8g"}, "only a3-highgpu-8g, .* have it"),
        ({"host_network": True}, "set host_network=false"),
        ({"gpu_direct_networks": "a;b"}, "has 4 networks"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        jobsets.documents(jobsets.GPU, gpu_direct=True, **settings)


def test_tpus_have_no_gpus():
    with pytest.raises(errors.ConfigError, match="gpu_direct=true with hardware=tpu"):
        jobsets.documents(jobsets.PATHWAYS, gpu_direct=True)
