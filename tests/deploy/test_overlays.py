"""Bases and components: valid as built, and what Kubernetes and JAX make of them."""

import itertools
import re
import shutil
import subprocess
import sys
import types

import pytest
import yaml

from elastic_ckpt.core import errors
from elastic_ckpt.training import configured, launch, load
from tests import pages
from tests.deploy import overlays

# They need kubectl.
pytestmark = [pytest.mark.slow, pytest.mark.needs("kubectl")]
GUIDES = overlays.DEPLOY.parents[1] / "docs/pages/guides"
# The components that a base may have: one of each line, and all or none of the last.
RESTARTS = {"gpu": ["in-place", "elastic"], "tpu": ["in-place", "restart-job"]}
MEMORY = ["node-agent", "gke-multitier"]
OTHERS = {
    "gpu": ["backup-hosts", "gpudirect-a3mega", "metrics"],
    "tpu": ["backup-hosts", "metrics"],
    "pathways": ["metrics"],
}


def faults(documents):
    """The faults of objects by all schemas, which take long to import."""
    from tests.deploy import manifest_check

    return manifest_check.problems(documents)


@pytest.mark.parametrize("base", OTHERS)
def test_each_base_with_each_choice_of_components_is_valid(base, tmp_path):
    restarts = [[], *([each] for each in RESTARTS.get(base, []))]
    memory = [[], *([each] for each in MEMORY)]
    for chosen in itertools.product(restarts, memory, [[], OTHERS[base]]):
        components = list(itertools.chain(*chosen))
        built = overlays.overlay(tmp_path, base, components)
        assert faults(built) == [], components
        # Their order does not matter.
        reordered = overlays.overlay(tmp_path, base, components[::-1])
        assert unordered(reordered) == unordered(built), components
        # The prefix reaches each name.
        assert "run" not in names(built)


def unordered(value):
    """The value with its lists sorted."""
    if isinstance(value, dict):
        return {key: unordered(each) for key, each in value.items()}
    return sorted(map(unordered, value), key=repr) if isinstance(value, list) else value


def names(documents):
    """The texts of all objects that may be names of objects."""
    for each in documents:
        if each["kind"] != "ConfigMap":
            text = re.sub("command: .*", "", yaml.safe_dump(each, width=1000))
            yield from re.findall(r"(?<=: )[\w-]+$", text, re.MULTILINE)


def test_the_example_the_agents_and_the_monitor_are_valid(tmp_path):
    for name in ("example", "agents/node-agent", "agents/gke-multitier"):
        assert faults(overlays.built(overlays.DEPLOY / name)) == [], name
    # The Prometheus operator finds the pods.
    metrics = overlays.copied(tmp_path) / "components/metrics/kustomization.yaml"
    chosen = metrics.read_text().replace("[pod_monitoring.yaml]", "[pod_monitor.yaml]")
    metrics.write_text(chosen)
    built = overlays.overlay(tmp_path, "tpu", ["metrics"])
    assert faults(built) == []
    monitor = overlays.only("PodMonitor", built)
    labels = {"jobset.sigs.k8s.io/jobset-name": "first-run"}
    assert monitor["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
def test_each_file_of_a_guide_is_valid(name, tmp_path):
    directory = overlays.copied(tmp_path) / "mine"
    directory.mkdir()
    (directory / "run.yml").write_text(overlays.RUN)
    count = 0
    for block in pages.blocks((GUIDES / f"{name}.md").read_text(), "yaml"):
        file = re.match(r"# (?:mine/)?(run.yml|kustomization.yaml)\n", block)
        if file:
            count += 1
            path = directory / file[1]
            path.write_text(block)
            if path.suffix == ".yml":
                configured.check_keys(load.load(path))
            else:
                assert faults(overlays.built(directory)) == [], block
    assert count


def test_the_jobset_of_pathways_is_what_its_program_writes(tmp_path):
    directory = shutil.copytree(overlays.DEPLOY / "base/pathways", tmp_path / "copy")
    before = (directory / "jobset.yaml").read_text()
    subprocess.run([sys.executable, directory / "make.py"], check=True)
    assert (directory / "jobset.yaml").read_text() == before


def test_all_gpu_hosts_are_the_one_job_in_which_jax_counts_them(monkeypatch, tmp_path):
    from jax._src.clusters import k8s_cluster

    (job,) = overlays.jobs(overlays.overlay(tmp_path, "gpu")).values()
    answer = types.SimpleNamespace(spec=types.SimpleNamespace(**job))
    monkeypatch.setattr(k8s_cluster.K8sCluster, "_job", classmethod(lambda _: answer))
    assert k8s_cluster.K8sCluster.get_process_count() == 4
    # Each pod learns its place from the index of an indexed Job.
    assert job["completionMode"] == "Indexed"


def test_each_pod_of_the_example_is_a_machine_with_a_slice_and_its_metrics():
    example = overlays.DEPLOY / "example"
    documents = overlays.built(example)
    (job,) = overlays.jobs(documents).values()
    config = load.load(example / "run.yml")
    configured.check_keys(config)
    configured.check_slices(config)
    pods = job["template"]["spec"]
    for pod in range(job["completions"]):
        # Kubernetes sets the first in the pods of an indexed Job.
        environment = {"JOB_COMPLETION_INDEX": str(pod), "POD_IP": f"10.0.0.{pod}"}
        place = launch.place(config, environment)
        assert config.elastic.elastic_machines == job["completions"]
        assert place.slices == range(pod, pod + 1)
        assert place.interface == f"10.0.0.{pod}"
    ports = {
        port["name"]: port["containerPort"] for port in pods["containers"][0]["ports"]
    }
    first = config.metrics.prometheus_port
    assert ports == {"metrics": first, "metrics-run": first + 1}
    grace_secs = config.run.termination_grace_period_seconds
    assert pods["terminationGracePeriodSeconds"] == grace_secs
    volumes = {volume["name"]: volume for volume in pods["volumes"]}
    size = volumes["local-checkpoints"]["emptyDir"]["sizeLimit"]
    assert size == config.tiers.local_checkpoint_size_limit


def test_the_run_finds_the_backup_hosts_by_the_names_of_their_pods(tmp_path):
    component = overlays.DEPLOY / "components/backup-hosts/kustomization.yaml"
    (urls,) = re.findall("peer_backup_urls: (.*)", component.read_text())
    built = overlays.overlay(tmp_path, "tpu", ["backup-hosts"])
    jobset = overlays.only("JobSet", built, "first-backup")
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    (port,) = (each["containerPort"] for each in container["ports"])
    command = container["command"]
    assert command[command.index("--backup") + 1] == urls
    # JobSet names a pod by these.
    assert urls.split(";") == [
        f"http://{name}-{job['name']}-0-{pod}.{name}:{port}/v1/run"
        for pod in range(pods["completions"])
    ]


PREEMPTED, WRONG = {"condition": "DisruptionTarget"}, {"code": errors.CONFIG_EXIT_CODE}
FAILED = {"code": 137}


def failed_job(job, code=None, condition=None):
    """The reason and message with which a pod's failure fails its Job, if it does."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        on_exit = rule.get("onExitCodes", {"values": []})
        types = [each["type"] for each in rule.get("onPodConditions", [])]
        if code not in on_exit["values"] and condition not in types:
            continue
        if rule["action"] == "Ignore":
            return None
        # From kubernetes/pkg/controller/job/pod_failure_policy.go.
        what = f"Pod default/demo-0 has condition {condition}"
        if code:
            name = on_exit.get("containerName")
            what = (
                f"Container {name} for pod default/demo-0 failed with exit code {code}"
            )
        return "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
    if job.get("backoffLimit") == 0:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def action(jobset, failure):
    """The action of JobSet: of the first rule that matches, or a counted restart.

    None if the Job only replaces its pod.
    """
    first = jobset["spec"]["replicatedJobs"][0]
    failed = failed_job(first["template"]["spec"], **failure)
    if failed is None:
        return None
    reason, message = failed
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("base", "components", "after_preemption", "after_failure"),
    [
        ("gpu", [], "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        ("pathways", [], "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        ("tpu", ["restart-job"], "RestartJobAndIgnoreMaxRestarts", "RestartJob"),
        # Only the pod is replaced.
        ("gpu", ["in-place"], None, None),
        ("gpu", ["elastic"], None, None),
    ],
)
def test_a_wrong_configuration_ends_the_run_and_other_failures_restart_what_they_should(
    base, components, after_preemption, after_failure, tmp_path
):
    jobset = overlays.only("JobSet", overlays.overlay(tmp_path, base, components))
    assert action(jobset, WRONG) == "FailJobSet"
    assert action(jobset, PREEMPTED) == after_preemption
    assert action(jobset, FAILED) == after_failure
