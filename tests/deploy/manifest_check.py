"""The faults of a manifest, by the schemas of JobSet and Kubernetes.

`kubeflow-trainer-api` has models of JobSet v1alpha2, made from its OpenAPI schema;
`kubernetes-validate` the schemas of Kubernetes, of which the strict ones know each
field. `known_fields.yaml` lists what they do not have, such as keys of maps.
"""

import functools
import itertools
import pathlib
import re

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

KUBERNETES = "1.37.0"
# JSON of 1 MB, read anew for each object otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)
KNOWN = yaml.safe_load(
    pathlib.Path(__file__).with_name("known_fields.yaml").read_text()
)
FREE_KEYS, JOBSET_VALUES = KNOWN["free_keys"], KNOWN["jobset_values"]
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def problems(documents: list[dict]) -> list[str]:
    """The faults of the documents of a manifest; empty if they are valid."""
    faults = []
    for document in documents:
        faults += _free_keys(document, document.get("kind", "a document without kind"))
        if document.get("kind") == "JobSet":
            faults += _jobset(document, documents)
        elif fields := KNOWN["other_kinds"].get(document.get("kind")):
            version = fields["apiVersion"]
            if document.get("apiVersion") != version:
                faults.append(f"{document['kind']}.apiVersion: not {version}")
            fields = {**fields, "apiVersion": "text", "kind": "text"}
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
        unknown = below.keys() - {*FREE_KEYS[key]} if key in FREE_KEYS else ()
        faults += [f"{place}.{key}: no such key {name}" for name in unknown]
        faults += _free_keys(below, f"{place}.{key}")
    return faults


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
    is_right = isinstance(value, {"text": str, "map": dict}.get(str(fields), ()))
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
