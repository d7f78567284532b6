"""The page about security lists all that the shipped manifests ask of a cluster."""

import re

import pytest
import yaml

from tests import runs

PAGE = (runs.ROOT / "docs/pages/about/security.md").read_text()
MANIFESTS = sorted((runs.ROOT / "configs/deploy").glob("*.yaml"))


def values(node, key):
    """The values of a key anywhere in an object."""
    children = node.values() if isinstance(node, dict) else node
    if isinstance(node, dict) and key in node:
        yield node[key]
    for child in children:
        if isinstance(child, dict | list):
            yield from values(child, key)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_row_of_a_manifest_names_all_that_it_asks_for(path):
    (row,) = (line for line in PAGE.splitlines() if f"`{path.name}`" in line)
    _, _, objects, node, _ = row.split("|")
    built = list(yaml.safe_load_all(path.read_text()))
    kinds = {each["kind"] for each in built} - {"JobSet", "ConfigMap"}
    assert kinds == set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\bRole\b", objects)) - {
        "JobSets"
    }
    asked = [each["path"] for each in values(built, "hostPath")]
    asked += [each["driver"] for each in values(built, "csi")]
    assert set(asked) <= set(re.findall(r"`([^` ]+)`", node))
    assert ("hostPath" in node) == any(values(built, "hostPath"))
    assert ("hostNetwork" in node) == any(values(built, "hostNetwork"))
    capabilities = {name for each in values(built, "add") for name in each}
    assert capabilities == set(re.findall("NET_[A-Z_]+", node))


def test_the_ports_of_the_manifests_are_listed():
    built = [yaml.safe_load_all(path.read_text()) for path in MANIFESTS]
    ports = {port for each in built for port in values(list(each), "containerPort")}
    # 29000 to 29002 are a range; the metrics have a key.
    assert {p for p in ports if str(p) not in PAGE} <= {29001, 9400}
