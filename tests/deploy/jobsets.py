"""Manifests of the shipped configurations, and their parts."""

import pathlib

from elastic_ckpt.deploy import manifest
from elastic_ckpt.training import load

SHIPPED = pathlib.Path(__file__).parents[2] / "configs" / "deploy"
PATHWAYS, TPU, GPU = "pathways_v6e", "multicontroller_v6e", "multicontroller_h100"


def documents(name, *overrides, build=manifest.documents):
    """What `build` makes of a shipped configuration with some other keys."""
    return build(load.load(SHIPPED / f"{name}.yml", overrides))


def only(kind, built):
    (document,) = (document for document in built if document["kind"] == kind)
    return document


def jobs(built):
    """The Job of each replicated job, by its name."""
    replicated = only("JobSet", built)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in replicated}


def program(built):
    """The container of the program; there is one in each kind of JobSet."""
    (container,) = (
        container
        for job in jobs(built).values()
        for container in job["template"]["spec"]["containers"]
        if container["name"] == "train"
    )
    return container


def configured(built, directory):
    """The configuration that the pods read."""
    path = directory / "config.yml"
    path.write_text(only("ConfigMap", built)["data"]["config.yml"])
    return load.load(path)
