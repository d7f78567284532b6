"""The faults of a manifest, by the schemas of JobSet and Kubernetes.

`kubeflow-trainer-api` has models of JobSet v1alpha2, made from its OpenAPI schema;
`kubernetes-validate` the schemas of Kubernetes, of which the strict ones know each
field. Maps whose keys are anyone's choice are no fields: their keys are listed here.
"""

import functools
import itertools

import kubernetes_validate
from kubeflow_trainer_api import models

KUBERNETES = "1.37.0"
# JSON of 1 MB, read anew for each object otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
FREE_KEYS = {
    "annotations": {EXCLUSIVE},
    "data": {"config.yml"},
    "labels": set(),
    "limits": {"cpu", "memory", "google.com/tpu", "nvidia.com/gpu"},
    "nodeSelector": {
        "cloud.google.com/gke-accelerator",
        "cloud.google.com/gke-nodepool",
        "cloud.google.com/gke-tpu-accelerator",
        "cloud.google.com/gke-tpu-topology",
        "node.kubernetes.io/instance-type",
    },
}


def problems(documents: list[dict]) -> list[str]:
    """The faults of the documents of a manifest; empty if they are valid."""
    faults = []
    for document in documents:
        faults += _free_keys(document, document.get("kind", "a document without kind"))
        if document.get("kind") == "JobSet":
            faults += _jobset(document, documents)
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
    jobs = [job["name"] for job in spec["replicatedJobs"]]
    named = [*spec.get("successPolicy", {}).get("targetReplicatedJobs", [])]
    if "coordinator" in spec:
        named.append(spec["coordinator"]["replicatedJob"])
    faults += [f"JobSet: no replicated job {job}" for job in named if job not in jobs]
    for replicated in spec["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
        faults += _kubernetes(job) or _references(job, documents)
    return faults


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
    for volume in volumes.values():
        name = volume.get("configMap", {}).get("name")
        if name and ("ConfigMap", name) not in objects:
            faults.append(f"volume {volume['name']}: no ConfigMap {name}")
    return faults
