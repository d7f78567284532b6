"""The programs of the shipped manifests start, with their runs in a bucket.

Each starts as its container does, with the files of the ConfigMap and the variables of
the manifest, and comes to the first device that this machine lacks: a GPU, libtpu, or
the proxy of Pathways. Only what belongs to a cluster is replaced: names of buckets and
pods, paths of mounts, and the API by which JAX finds the hosts of GPU pods.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.deploy import nodes, slurm
from elastic_ckpt.training import load
from tests import runs, shared_memory
from tests.deploy import fake_slurm, jobsets, local_pods
from tests.processes import outer_launcher

LACKING = {
    "gpu": "hardware=gpu, but JAX finds only CPUs",
    "tpu": "Unable to initialize backend 'tpu'",
}
in_gs = pytest.mark.parametrize("bucket", ["gs"], indirect=True)
in_s3 = pytest.mark.parametrize("bucket", ["s3"], indirect=True)


@pytest.fixture
def ram():
    with shared_memory.directory("pods") as directory:
        yield directory


@pytest.fixture
def data(bucket, corpus):
    """The data of the shipped configurations, in the bucket."""
    url = f"{bucket}/data/texts.array_record"
    storage.write_atomic(url, pathlib.Path(corpus).read_bytes())
    return url


def container_of(name, replaced, directory):
    """The program of a shipped manifest, and its variables, on this machine."""
    built = jobsets.documents(name)
    container = jobsets.program(built)
    for file, text in jobsets.only("ConfigMap", built)["data"].items():
        (directory / file).write_text(local(text, replaced))
    mounted = next(m for m in container["volumeMounts"] if m["name"] == "config")
    replaced = {mounted["mountPath"]: str(directory), **replaced}
    variables = {}
    for each in container["env"]:
        value = each.get("value", "127.0.0.1")
        variables[each["name"]] = local(
            re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], value), replaced
        )
    return [local(word, replaced) for word in container["command"]], variables


def local(text, replaced):
    for remote, here in replaced.items():
        # As whole words: /local is not that of /usr/local or //localhost.
        text = re.sub(rf"(?<![\w/]){re.escape(remote)}(?!\w)", here, text)
    return text


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@in_gs
@pytest.mark.parametrize("name", ["multicontroller_v6e", "gke_multitier_v6e"])
def test_a_host_with_tpus_comes_to_its_first_device(name, bucket, ram, tmp_path):
    replaced = {"gs://my-bucket": bucket, "/local": ram}
    (program, *words), variables = container_of(name, replaced, tmp_path)
    assert program == "elastic-ckpt"
    ended = subprocess.run(
        runs.command(*words),
        env=runs._environment() | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert LACKING["tpu"] in ended.stderr, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@in_s3
@pytest.mark.parametrize(
    "name", ["multicontroller_h100", "in_place_h100", "node_agent_h100"]
)
def test_hosts_with_gpus_join_and_come_to_their_first_devices(
    name, bucket, ram, tmp_path, monkeypatch
):
    replaced = {"gs://my-bucket": bucket, "/local": ram}
    (program, verb, config), variables = container_of(name, replaced, tmp_path)
    assert (program, verb) == ("elastic-ckpt", "train")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    # JAX finds the hosts by the variables of Slurm instead of the API of Kubernetes.
    with outer_launcher.tasks(config) as hosts:
        for output in outer_launcher.outputs(hosts):
            assert LACKING["gpu"] in output, output


def configured(name, directory, bucket, data, **settings):
    """A shipped configuration with the places of this machine."""
    base = {"base_config": str(jobsets.SHIPPED / f"{name}.yml"), "run_name": "tiny"}
    path = directory / "config.yml"
    values = {
        **base,
        "base_output_directory": bucket,
        "grain_train_files": data,
        **settings,
    }
    # JSON is YAML.
    path.write_text(json.dumps(values))
    return path


@pytest.mark.slow
@in_gs
@pytest.mark.parametrize("name", ["elastic_h100", "backup_h100"])
def test_supervisors_meet_and_their_hosts_come_to_their_first_devices(
    name, bucket, data, ram, tmp_path
):
    secret = tmp_path / "secret"
    secret.write_text("the-secret-of-this-run\n")
    secret.chmod(0o600)
    config = configured(
        *(name, tmp_path, bucket, data),
        local_checkpoint_directory=ram,
        **({"peer_secret_file": str(secret)} if name == "backup_h100" else {}),
    )
    with local_pods.Pods(config, ram) as pods:
        every = list(pods.started)
        outputs = [pods.ended(number, may=every) for number in every]
    assert {code for code, _ in outputs} == {1}
    for _, output in outputs:
        assert LACKING["gpu"] in output, output


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@in_s3
def test_the_head_comes_to_the_proxy_of_pathways(bucket, ram, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        replaced = {
            "gs://my-bucket": bucket,
            "/local": ram,
            "grpc://localhost:29000": f"grpc://127.0.0.1:{proxy.getsockname()[1]}",
        }
        (program, *words), variables = container_of(
            jobsets.PATHWAYS, replaced, tmp_path
        )
        assert program == "elastic-ckpt"
        head = subprocess.Popen(
            runs.command(*words),
            env=runs._environment() | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with head:
            try:
                came = await_connection(proxy, head)
            finally:
                head.kill()
            output = head.stdout.read()
    assert came, output


def await_connection(listening, process):
    """Whether a process connects before it ends."""
    listening.settimeout(0.1)
    while process.poll() is None:
        with contextlib.suppress(TimeoutError):
            listening.accept()[0].close()
            return True
    return False


OWN_PROGRAM = """
import os, sys
import jax
import elastic_ckpt as ec
from elastic_ckpt.training import load
from elastic_ckpt.elastic import multicontroller

config = load.load(os.environ["ELASTIC_CKPT_CONFIG"])
_, option, checkpoints = sys.argv
assert option == "--checkpoints"
assert os.environ["LOG_LEVEL"] == "info"
tiers = [ec.Local(os.environ["ELASTIC_CKPT_LOCAL"], every=1)]
with ec.Checkpointer([*tiers, ec.Persistent(checkpoints, every=1)]) as checkpointer:
    assert checkpointer.latest is None
    jax.devices("cuda")
"""


@pytest.mark.slow
@in_gs
def test_a_program_of_the_user_comes_to_its_first_device(bucket, ram, tmp_path):
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "train.py").write_text(OWN_PROGRAM)
    # The settings of NCCL, which the installer of its plugin brings.
    profile = tmp_path / "profile.sh"
    profile.write_text("")
    name = "own_program_h100_mega"
    replaced = {
        "gs://my-bucket": bucket,
        "/local": ram,
        "/usr/local/nvidia/lib64/nccl-env-profile.sh": str(profile),
    }
    words, variables = container_of(name, replaced, tmp_path)
    words[words.index("python")] = sys.executable
    environment = runs._environment() | variables
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path), environment["PYTHONPATH"]]
    )
    ended = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    )
    assert "Unknown backend cuda" in ended.stderr, ended.stdout + ended.stderr


def test_the_agent_of_a_node_comes_to_the_api_of_its_cluster(ram, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = load.load(jobsets.SHIPPED / "node_agent_h100.yml")
    daemon_set = jobsets.only("DaemonSet", nodes.documents(config))
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert program == "elastic-ckpt"
    replaced = {"/local": ram, "$(POD_IP)": "127.0.0.1", "$(NODE_NAME)": "node-7"}
    output = runs.verb(*(replaced.get(word, word) for word in words), code=1)
    assert "the labels of a node are read from the Kubernetes API" in output


@pytest.mark.slow
@in_gs
def test_the_script_for_slurm_comes_to_its_first_devices(bucket, data, ram, tmp_path):
    config = configured(
        *("slurm_h100", tmp_path, bucket, data),
        slurm_ram_directory=ram,
        slurm_setup=f"cd {runs.ROOT}",
        max_restarts=0,
    )
    text = slurm.script(load.load(config))
    job = fake_slurm.start(text, tmp_path)
    output, _ = job.communicate()
    assert job.returncode == 1, output
    assert LACKING["gpu"] in output, output
