"""The programs of the containers start.

Each starts as its container does, with the files and variables of the built overlay,
and comes to the first device that this machine lacks: a GPU, libtpu, the proxy of
Pathways, or the API of Kubernetes. Only what belongs to a cluster is replaced: the
bucket, paths of mounts, and addresses of pods.
"""

import contextlib
import pathlib
import re
import socket
import subprocess

import pytest

from tests import runs, shared_memory
from tests.deploy import overlays

# They need kubectl.
pytestmark = [pytest.mark.slow, pytest.mark.needs("kubectl")]
LACKING = {
    "gpu": "hardware=gpu, but JAX finds only CPUs",
    "tpu": "Unable to initialize backend 'tpu'",
}
RUN = """\
run_name: tiny
base_output_directory: gs://my-bucket/runs
grain_train_files: gs://my-bucket/texts.array_record
global_batch_size: 192
local_checkpoint_directory: /local
"""


@pytest.fixture
def here(corpus, tmp_path):
    """What stands on this machine for what is in a cluster."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "texts.array_record").symlink_to(corpus)
    (tmp_path / "etc").mkdir()
    with shared_memory.directory("pods") as ram:
        yield {
            "gs://my-bucket/data": str(bucket),
            "gs://my-bucket": str(bucket),
            "/etc/elastic-ckpt": str(tmp_path / "etc"),
            "/local": ram,
            "$(POD_IP)": "127.0.0.1",
            "$(NODE_NAME)": "node-7",
        }


def local(text, here):
    for remote, replaced in here.items():
        # As whole words: /local is not that of /usr/local or //localhost.
        text = re.sub(rf"(?<![\w/]){re.escape(remote)}(?!\w)", replaced, text)
    return text


def started(container, here, documents=(), **more):
    """The process of a container on this machine."""
    for each in documents:
        if each["kind"] == "ConfigMap":
            text = local(each["data"]["run.yml"], here)
            pathlib.Path(here["/etc/elastic-ckpt"], "run.yml").write_text(text)
    variables = {}
    for each in container["env"]:
        value = each.get("value", "127.0.0.1")
        variables[each["name"]] = local(
            re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], value), here
        )
    words = [local(word, here) for word in container["command"]]
    before = words[: words.index("elastic-ckpt")]
    return subprocess.Popen(
        [*before, *runs.command(*words[len(before) + 1 :])],
        env=runs._environment() | variables | more,
        cwd=here["/etc/elastic-ckpt"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("base", "components"),
    [("gpu", []), ("gpu", ["gpudirect-a3mega", "metrics"]), ("tpu", [])],
)
def test_a_host_comes_to_its_first_device(base, components, here, tmp_path):
    run = f"{RUN}hardware: {base}\n"
    documents = overlays.overlay(tmp_path, base, components, run=run)
    profile = tmp_path / "profile.sh"
    profile.touch()
    here["/usr/local/nvidia/lib64/nccl-env-profile.sh"] = str(profile)
    with started(overlays.program(documents), here, documents) as host:
        output = host.stdout.read()
    assert host.returncode, output
    assert LACKING[base] in output, output


@pytest.mark.night
def test_the_supervisors_of_the_example_come_to_their_first_devices(here):
    documents = overlays.built(overlays.DEPLOY / "example")
    container = overlays.program(documents)
    (job,) = overlays.jobs(documents).values()
    pods = [
        started(container, here, documents, JOB_COMPLETION_INDEX=str(pod))
        for pod in range(job["completions"])
    ]
    outputs = [pod.communicate()[0] for pod in pods]
    assert any(LACKING["gpu"] in output for output in outputs), outputs
    assert all(pod.returncode for pod in pods)


def test_the_head_comes_to_the_proxy_of_pathways(here, tmp_path):
    run = f"{RUN}hardware: tpu\nenable_single_controller: true\n"
    documents = overlays.overlay(tmp_path, "pathways", run=run)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"grpc://127.0.0.1:{proxy.getsockname()[1]}"
        here["grpc://localhost:29000"] = address
        with started(overlays.program(documents), here, documents) as head:
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


def test_a_backup_host_serves_its_memory(here, tmp_path):
    documents = overlays.overlay(tmp_path, "tpu", ["backup-hosts"])
    jobset = overlays.only("JobSet", documents, "first-backup")
    pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    secret = tmp_path / "secret"
    secret.write_text("a" * 32)
    secret.chmod(0o600)
    here["/etc/run-secret/secret"] = str(secret)
    with started(container, here) as agent:
        line = agent.stdout.readline()
        agent.terminate()
        output = line + agent.stdout.read()
    assert f"127.0.0.1:{container['ports'][0]['containerPort']}" in output


def test_the_agent_of_a_node_comes_to_the_api_of_its_cluster(here, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    documents = overlays.built(overlays.DEPLOY / "agents/node-agent")
    (daemon_set,) = (each for each in documents if each["kind"] == "DaemonSet")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    with started(container, here) as agent:
        output = agent.stdout.read()
    assert agent.returncode == 1
    assert "the labels of node node-7 cannot be read" in output
