"""Manifests of the shipped configurations, and their parts."""

import pathlib

from elastic_ckpt.deploy import manifest
from elastic_ckpt.training import load

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "deploy"
PATHWAYS, TPU, GPU = "pathways_v6e", "multicontroller_v6e", "multicontroller_h100"


def documents(name, *overrides, **settings):
    overrides = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
    return manifest.documents(load.load(SHIPPED / f"{name}.yml", overrides))


def only(kind, built):
    (document,) = (document for document in built if document["kind"] == kind)
    return document


def pods(built):
    """The pod template of each replicated job, by its name."""
    jobs = only("JobSet", built)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"] for job in jobs}


def container(template, name):
    spec = template["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    (only_one,) = (each for each in containers if each["name"] == name)
    return only_one


def roles(name, *overrides, **settings):
    """The pod template and the container of our code of each role of a manifest."""
    built = documents(name, *overrides, **settings)
    names = {
        "pathways-head": ("head", "train"),
        "pathways-worker": ("worker", "colocated-python-sidecar"),
        "slice": ("host", "train"),
        "hosts": ("host", "train"),
    }
    return {
        names[job][0]: (template, container(template, names[job][1]))
        for job, template in pods(built).items()
    }
