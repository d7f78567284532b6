"""The faults of a manifest, by the schemas of JobSet and Kubernetes.

`kubeflow-trainer-api` has models of JobSet v1alpha2, made from its OpenAPI schema;
`kubernetes-validate` the schemas of Kubernetes, of which the strict ones know each
field. Maps whose keys are anyone's choice are no fields: their keys are listed here.
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
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_OF_JOBSET = "jobset.sigs.k8s.io"
# Keys that anyone chooses: those of GKE's guides and Google's examples (June 2026), of
# Kueue's API v1beta1, of JobSet 0.12, and of the tests.
FREE_KEYS = {
    "annotations": {
        EXCLUSIVE,
        "devices.gke.io/container.tcpx-daemon",
        "devices.gke.io/container.tcpxo-daemon",
        "gke-gcsfuse/volumes",
        "networking.gke.io/default-interface",
        "networking.gke.io/interfaces",
        "note",
    },
    "data": {"config.yml", "maxtext.yml"},
    "labels": {
        "app.kubernetes.io/instance",
        "app.kubernetes.io/name",
        "kueue.x-k8s.io/queue-name",
        "team",
        f"{_OF_JOBSET}/jobset-name",
        f"{_OF_JOBSET}/replicatedjob-name",
    },
    "limits": {"cpu", "memory", "amd.com/gpu", "google.com/tpu", "nvidia.com/gpu"},
    "matchLabels": {
        "app.kubernetes.io/instance",
        "app.kubernetes.io/name",
        f"{_OF_JOBSET}/jobset-name",
        f"{_OF_JOBSET}/replicatedjob-name",
    },
    "nodeSelector": {
        "cloud.google.com/gke-accelerator",
        "cloud.google.com/gke-nodepool",
        "cloud.google.com/gke-spot",
        "cloud.google.com/gke-tpu-accelerator",
        "cloud.google.com/gke-tpu-topology",
        "cloud.google.com/reservation-affinity",
        "cloud.google.com/reservation-name",
        "cloud.google.com/reservation-project",
        "node.kubernetes.io/instance-type",
        "pool",
    },
    "requests": {"cpu", "memory"},
    "volumeAttributes": {"bucketName", "mountOptions"},
}
# Values that the model of JobSet takes for any text: those of JobSet 0.12, and the
# reasons for which Kubernetes 1.37 fails a Job.
JOBSET_VALUES = {
    "action": {
        "FailJobSet",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
    },
    "onJobFailureReasons": {
        "BackoffLimitExceeded",
        "DeadlineExceeded",
        "FailedIndexes",
        "MaxFailedIndexesExceeded",
        "PodFailurePolicy",
    },
    "restartStrategy": {"BlockingRecreate", "InPlaceRestart", "Recreate"},
}
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
# The fields of kinds of which no package has a model: of GKE 1.32.4-gke.1415000, of
# prometheus-engine 0.17 and of prometheus-operator 0.89, as far as manifests use them.
# Values are types, or fields.
_NAMED = {"metadata": {"name": str, "namespace": str}}
_SELECTOR = {"matchLabels": dict}
_ENDPOINT = {"port": str, "interval": str, "path": str}
OTHER_KINDS = {
    ("checkpointing.gke.io/v1", "CheckpointConfiguration"): {
        "metadata": {"name": str},
        "spec": {
            "cloudStorageBucketName": str,
            "nodeSelector": dict,
            "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}],
            "inMemoryVolumeSize": str,
            "gcsFuseMountOptions": [str],
        },
    },
    ("monitoring.googleapis.com/v1", "PodMonitoring"): {
        **_NAMED,
        "spec": {"selector": _SELECTOR, "endpoints": [_ENDPOINT]},
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        **_NAMED,
        "spec": {"selector": _SELECTOR, "endpoints": [_ENDPOINT]},
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        **_NAMED,
        "spec": {"selector": _SELECTOR, "podMetricsEndpoints": [_ENDPOINT]},
    },
}


def problems(documents: list[dict]) -> list[str]:
    """The faults of the documents of a manifest; empty if they are valid."""
    faults = []
    for document in documents:
        faults += _free_keys(document, document.get("kind", "a document without kind"))
        if document.get("kind") == "JobSet":
            faults += _jobset(document, documents)
        elif _kind(document) in OTHER_KINDS:
            fields = {"apiVersion": str, "kind": str, **OTHER_KINDS[_kind(document)]}
            faults += _fields(document, fields, document["kind"])
        else:
            faults += _kubernetes(document)
    return faults


def _all(parts) -> list[str]:
    return list(itertools.chain.from_iterable(parts))


def _free_keys(value, place: str) -> list[str]:
    if isinstance(value, list):
        return _all(_free_keys(v, f"{place}[{n}]") for n, v in enumerate(value))
    if not isinstance(value, dict):
        return []
    faults = []
    for key, below in value.items():
        unknown = below.keys() - FREE_KEYS[key] if key in FREE_KEYS else ()
        faults += [f"{place}.{key}: no such key {name}" for name in unknown]
        faults += _free_keys(below, f"{place}.{key}")
    return faults


def _kind(document: dict) -> tuple:
    return document.get("apiVersion"), document.get("kind")


def _fields(value, fields, place: str) -> list[str]:
    """The parts of `value` that the table `fields` does not have."""
    if isinstance(fields, dict) and isinstance(value, dict):
        unknown = [f"{place}: no such field {key}" for key in value.keys() - fields]
        known = [key for key in value if key in fields]
        return unknown + _all(
            _fields(value[key], fields[key], f"{place}.{key}") for key in known
        )
    if isinstance(fields, list) and isinstance(value, list):
        return _all(_fields(each, fields[0], f"{place}[]") for each in value)
    is_right = isinstance(fields, type) and isinstance(value, fields)
    return [] if is_right else [f"{place}: {value!r} is not {fields}"]


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
    for rule in rules:
        pairs += [(r, v) for r in rule.keys() & JOBSET_VALUES for v in _list(rule[r])]
    names = [rule["name"] for rule in rules]
    faults = [f"rule {name}: not a name" for name in names if not _is_rule(name)]
    faults += [f"rule {name}: twice" for name in {*names} if names.count(name) > 1]
    return faults + [
        f"failurePolicy.{key}: no such value {value}"
        for key, value in pairs
        if value not in JOBSET_VALUES[key]
    ]


def _list(value) -> list:
    return value if isinstance(value, list) else [value]


def _is_rule(name: str) -> bool:
    return bool(RULE_NAME.fullmatch(name))


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
