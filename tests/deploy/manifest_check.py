"""The faults of objects of Kubernetes, by the schemas of JobSet and Kubernetes.

`kubeflow-trainer-api` has models of JobSet v1alpha2, made from its OpenAPI schema;
`kubernetes-validate` the schemas of Kubernetes, of which the strict ones know each
field.
"""

import functools
import itertools
import re

import kubernetes_validate
from kubeflow_trainer_api import models

KUBERNETES = "1.37.0"
# JSON of 1 MB, read anew for each object otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)
# Values that the model of JobSet takes for any text: those of JobSet 0.12, and the
# reasons for which Kubernetes 1.37 fails a Job.
JOBSET_VALUES = {
    "action": (
        *("FailJobSet", "RestartJob", "RestartJobAndIgnoreMaxRestarts"),
        *("RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    ),
    "onJobFailureReasons": (
        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
        *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
    ),
    "restartStrategy": ("BlockingRecreate", "InPlaceRestart", "Recreate"),
}
# Kinds of which no package has a model.
OTHER_KINDS = {
    "CheckpointConfiguration": "checkpointing.gke.io/v1",
    "PodMonitoring": "monitoring.googleapis.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def problems(documents: list[dict]) -> list[str]:
    """The faults of objects; empty if they are valid."""
    faults = []
    for document in documents:
        if document.get("kind") == "JobSet":
            faults += _jobset(document, documents)
        elif version := OTHER_KINDS.get(document.get("kind")):
            if document["apiVersion"] != version:
                faults.append(f"{document['kind']}.apiVersion: not {version}")
        else:
            faults += _kubernetes(document)
    return faults


def _all(parts) -> list[str]:
    return list(itertools.chain.from_iterable(parts))


def _kubernetes(document: dict) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{error.json_path}: {error.message}"]
    except (KeyError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"no schema for it: {error!r}"]
    return []


def _jobset(document: dict, documents: list[dict]) -> list[str]:
    try:
        understood = models.JobsetV1alpha2JobSet.from_dict(document).to_dict()
    except ValueError as error:
        return [str(error)]
    faults = _lost(document, understood, "JobSet")
    if document.get("apiVersion") != "jobset.x-k8s.io/v1alpha2":
        faults.append(f"JobSet.apiVersion: {document.get('apiVersion')}")
    if faults:
        return faults
    spec = document["spec"]
    faults += _values(spec.get("failurePolicy", {}))
    jobs = [job["name"] for job in spec["replicatedJobs"]]
    named = [*spec.get("successPolicy", {}).get("targetReplicatedJobs", [])]
    if "coordinator" in spec:
        named.append(spec["coordinator"]["replicatedJob"])
    faults += [f"JobSet: no replicated job {job}" for job in named if job not in jobs]
    for replicated in spec["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
        faults += _kubernetes(job) or _references(job, documents)
    return faults


def _values(policy: dict) -> list[str]:
    """The values of a failure policy that JobSet does not take."""
    rules = policy.get("rules", [])
    pairs = [("restartStrategy", policy.get("restartStrategy", "Recreate"))]
    pairs += [("action", rule["action"]) for rule in rules]
    reasons = "onJobFailureReasons"
    pairs += [(reasons, each) for rule in rules for each in rule.get(reasons, [])]
    names = [rule["name"] for rule in rules]
    faults = [
        f"rule {name}: not a name" for name in names if not RULE_NAME.fullmatch(name)
    ]
    faults += [f"rule {name}: twice" for name in {*names} if names.count(name) > 1]
    return faults + [
        f"failurePolicy.{key}: no such value {value}"
        for key, value in pairs
        if value not in JOBSET_VALUES[key]
    ]


def _lost(given, understood, place: str) -> list[str]:
    """The parts of `given` that a model dropped or changed; it may add defaults."""
    if isinstance(given, dict) and isinstance(understood, dict):
        pairs = [(key, value, understood.get(key)) for key, value in given.items()]
    elif isinstance(given, list) and isinstance(understood, list):
        if len(given) != len(understood):
            return [f"{place}: {len(given)} parts, {len(understood)} understood"]
        pairs = list(zip(range(len(given)), given, understood, strict=True))
    else:
        return [] if given == understood else [f"{place}: {given!r} is not a field"]
    return _all(_lost(a, b, f"{place}.{key}") for key, a, b in pairs)


def _references(job: dict, documents: list[dict]) -> list[str]:
    """Names in a pod that stand for nothing."""
    pod = job["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    objects = {(d.get("kind"), d.get("metadata", {}).get("name")) for d in documents}
    faults = []
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                faults.append(f"{container['name']}: no volume {mount['name']}")
        for field, key in (("volumeMounts", "mountPath"), ("env", "name")):
            values = [each[key] for each in container.get(field, [])]
            twice = [value for value in {*values} if values.count(value) > 1]
            faults += [f"{container['name']}.{field}: {each} twice" for each in twice]
    claimed = [each["name"] for each in pod.get("volumes", [])]
    faults += [f"volume {n}: twice" for n in volumes if claimed.count(n) > 1]
    for volume in volumes.values():
        name = volume.get("configMap", {}).get("name")
        if name and ("ConfigMap", name) not in objects:
            faults.append(f"volume {volume['name']}: no ConfigMap {name}")
    return faults
