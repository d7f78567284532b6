"""The check that the manifests pass finds what a person could get wrong in one."""

import copy

import pytest
import yaml

from tests.deploy import jobsets, manifest_check

MANIFESTS = sorted(jobsets.SHIPPED.glob("*.yaml"))


def keys(value, place=()):
    """The place of every key, of lists the places of every member."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield (*place, key)
            yield from keys(below, (*place, key))
    if isinstance(value, list):
        for number, below in enumerate(value):
            yield from keys(below, (*place, number))


def renamed(value, place, name):
    """A copy of `value` in which the key at `place` is called `name`."""
    changed = copy.deepcopy(value)
    *above, key = place
    holder = changed
    for step in above:
        holder = holder[step]
    holder[name] = holder.pop(key)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("ways", [1, 3])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_each_misspelt_key_of_a_manifest_is_found(path, ways):
    right = list(yaml.safe_load_all(path.read_text()))
    assert manifest_check.problems(right) == []
    paths = list(keys(right))
    assert len(paths) > (10 if path.stem == "checkpoint_configuration" else 60)
    for number, place in enumerate(paths):
        key = place[-1]
        wrongs = (key + "s", key[:-1], key.swapcase())
        for way in range(number, number + ways):
            wrong = wrongs[way % len(wrongs)]
            problems = manifest_check.problems(renamed(right, place, wrong))
            assert problems, f"{wrong} instead of {key} at {place}"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("name: dshm", "name: dshn", "no volume"),
        ("completions: 4", "completions: four", "valid integer"),
        ("maxRestarts: 10", "maxRestarts: '10'", "valid integer"),
        ("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1", "apiVersion"),
        ("kind: JobSet", "kind: Jobset", "no schema"),
        ("restartPolicy: Never", "restartPolicy: 3", "string"),
        ("name: demo-gpu", "name: demo-cpu", "no ConfigMap"),
    ],
)
def test_a_wrong_value_is_found(before, after, problem):
    text = (jobsets.SHIPPED / "multicontroller_h100.yaml").read_text()
    assert before in text
    wrong = list(yaml.safe_load_all(text.replace(before, after, 1)))
    assert problem in str(manifest_check.problems(wrong))
