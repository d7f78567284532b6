"""Each base with its components is today's manifest but for names and accounts."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.deploy import jobsets, manifest_check
from tests.deploy.jobsets import GPU, PATHWAYS, SHIPPED, TPU

IMAGES = "us-docker.pkg.dev/my-project/my-images/"
MONITORED = (
    "prometheus_port=9400",
    "prometheus_interface=0.0.0.0",
    "metrics_monitor=pod_monitoring",
)
IN_PLACE = (
    "restart_strategy=in_place",
    "service_account=",
    f"in_place_restart_image={IMAGES}agent:1",
)
MEGA = ("machine_type=a3-megagpu-8g", "gpu_direct=true")
CASES = [
    ("gpu", [], GPU, ()),
    ("gpu", ["in-place"], "in_place_h100", ()),
    ("gpu", ["elastic"], "elastic_h100", ()),
    ("gpu", ["elastic", "backup-hosts"], "backup_h100", ()),
    ("gpu", ["node-agent"], "node_agent_h100", ()),
    ("gpu", ["gpudirect-a3mega"], GPU, MEGA),
    ("gpu", ["in-place", "gpudirect-a3mega"], "in_place_h100", MEGA),
    ("gpu", ["metrics"], GPU, MONITORED),
    ("gpu", ["elastic", "metrics"], "elastic_h100", MONITORED),
    ("tpu", [], TPU, ()),
    (
        "tpu",
        ["restart-job", "gke-multitier"],
        "gke_multitier_v6e",
        ("local_checkpoint_size_limit=64Gi",),
    ),
    ("tpu", ["in-place"], TPU, IN_PLACE),
    ("pathways", [], PATHWAYS, ()),
    ("pathways", ["node-agent"], PATHWAYS, ("local_checkpoint_volume=node_agent",)),
    ("pathways", ["metrics"], PATHWAYS, MONITORED),
]
# What differs by intent: components say it for all bases, or name it otherwise.
BY_INTENT = (
    "metrics-run",
    "serviceAccountName",
    "jobset.sigs.k8s.io/replicatedjob-name",
    "metadata.labels.base",
    "targetReplicatedJobs",
)
ORDERED = ("rules", "command", "args")


def kustomized(directory):
    built = subprocess.run(
        ["kubectl", "kustomize", directory],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return list(yaml.safe_load_all(built.stdout))


def overlaid(root, base, components):
    shutil.copytree(SHIPPED, root / "deploy")
    directory = root / "deploy" / "mine"
    directory.mkdir()
    (directory / "run.yml").write_text("steps: 1\n")
    chosen = {
        "resources": [f"../base/{base}"],
        "components": [f"../components/{each}" for each in components],
        "namePrefix": "first-",
        "namespace": "default",
        "configMapGenerator": [{"name": "run", "files": ["run.yml"]}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    (directory / "kustomization.yaml").write_text(json.dumps(chosen))
    return kustomized(directory)


def lines(documents):
    """Each value with its place; names of runs, images and mounts are equal in all."""
    found = []
    for each in documents:
        if each["kind"] in ("ConfigMap", "ServiceAccount"):
            continue
        if each["metadata"]["name"] == "first-backup":
            each["metadata"]["name"] = "first-run"
            each["spec"]["replicatedJobs"][0]["name"] = "backup"
        found += values_of(each, each["kind"])
    equal = {
        r"\b(demo-\w+(-\w+)?|first-(run|in-place))(?=\b[^-]|$)": "NAME",
        rf"({IMAGES}.*|(elastic-ckpt|in-place).*)(?=\"$)": "IMAGE",
        "config.yml": "run.yml",
        "runs/pathways": "pathways",
        "user-etc-run-secret|run-secret": "SECRET",
        'secretName: "NAME"': 'secretName: "SECRET"',
        "/local/run": "/local/NAME",
    }
    for pattern, name in equal.items():
        found = [re.sub(pattern, name, each) for each in found]
    return {each for each in found if not any(word in each for word in BY_INTENT)}


def values_of(value, place):
    if isinstance(value, dict):
        for key, below in value.items():
            yield from values_of(below, f"{place}.{key}")
    elif isinstance(value, list):
        is_ordered = place.startswith("JobSet") and place.endswith(ORDERED)
        for number, member in enumerate(value):
            named = member.get("name", "") if isinstance(member, dict) else ""
            key = number if is_ordered else named
            yield from values_of(member, f"{place}[{key}]")
    else:
        yield f"{place}: {json.dumps(value)}"


@pytest.mark.parametrize(("base", "components", "name", "overrides"), CASES)
def test_a_base_with_components_is_a_manifest_of_today(
    base, components, name, overrides, tmp_path
):
    built = overlaid(tmp_path, base, components)
    assert manifest_check.problems(built) == []
    mine, today = lines(built), lines(jobsets.documents(name, *overrides))
    print(*sorted(mine ^ today), sep="\n")
    assert mine == today


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("node-agent", "node_agents"), ("gke-multitier", "checkpoint_configuration")],
)
def test_the_agents_are_those_of_today(ours, theirs):
    before = list(yaml.safe_load_all((SHIPPED / f"{theirs}.yaml").read_text()))
    built = kustomized(SHIPPED / "agents" / ours)
    assert manifest_check.problems(built) == []
    changed = lines(built) ^ lines(before)
    # The name, the example's size, and the example's label of a failure domain.
    of_example = ("metadata", "matchLabels", "inMemoryVolumeSize", "command")
    assert not [line for line in changed if not any(w in line for w in of_example)]
