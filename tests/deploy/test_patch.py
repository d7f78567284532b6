"""Patches of the user over a manifest."""

import copy
import json

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import patch
from tests.deploy import jobsets, manifest_check

OBJECT = {
    "kind": "Thing",
    "metadata": {"name": "a", "labels": {"x": "1"}},
    "spec": {
        "containers": [
            {"name": "one", "image": "i", "ports": [{"containerPort": 1}]},
            {"name": "two", "args": ["a", "b"]},
        ],
    },
}


def patched(change, **selection):
    documents = [copy.deepcopy(OBJECT)]
    (result,) = patch.patched(
        documents, [{"kind": "Thing", **selection, "patch": change}]
    )
    assert documents == [OBJECT]
    return result


def test_mappings_are_merged_and_null_removes_a_key():
    result = patched({"metadata": {"labels": {"x": None, "y": "2"}}})
    assert result["metadata"] == {"name": "a", "labels": {"y": "2"}}
    assert result["spec"] == OBJECT["spec"]


def test_members_with_names_are_merged_added_and_removed():
    result = patched(
        {
            "spec": {
                "containers": [
                    {"name": "one", "ports": [{"containerPort": 2}]},
                    {"name": "two", "$patch": "delete"},
                    {"name": "three"},
                ]
            }
        }
    )
    assert result["spec"]["containers"] == [
        {
            "name": "one",
            "image": "i",
            "ports": [{"containerPort": 1}, {"containerPort": 2}],
        },
        {"name": "three"},
    ]


def test_a_variable_is_replaced_where_it_is():
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    present = [{"name": "A", "valueFrom": source}, {"name": "B", "value": "$(A)"}]
    change = [{"name": "A", "value": "1"}, {"name": "C", "value": "2"}]
    assert patch.merged({"env": present}, {"env": change}) == {
        "env": [{"name": "A", "value": "1"}, present[1], change[1]]
    }


def test_other_lists_are_replaced():
    result = patched({"spec": {"containers": [{"name": "two", "args": ["c"]}]}})
    assert result["spec"]["containers"][1] == {"name": "two", "args": ["c"]}


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.PATHWAYS])
def test_a_patch_reaches_a_container_of_the_jobset(name):
    built = jobsets.documents(name)
    job = jobsets.only("JobSet", built)["spec"]["replicatedJobs"][0]["name"]
    container = {"name": "train", "workingDir": "/work"}
    pods = {"spec": {"template": {"spec": {"containers": [container]}}}}
    change = {"spec": {"replicatedJobs": [{"name": job, "template": pods}]}}
    value = json.dumps([{"kind": "JobSet", "patch": change}])
    result = jobsets.documents(name, f"manifest_patches={value}")
    changed = jobsets.container(jobsets.pods(result)[job], "train")
    before = jobsets.container(jobsets.pods(built)[job], "train")
    assert changed == {**before, "workingDir": "/work"}
    assert manifest_check.problems(result) == []


def test_a_name_chooses_among_objects_of_a_kind():
    other = {**OBJECT, "metadata": {"name": "b"}}
    value = [{"kind": "Thing", "name": "b", "patch": {"new": 1}}]
    assert patch.patched([OBJECT, other], value) == [OBJECT, {**other, "new": 1}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"kind": "Thing", "name": "b", "patch": {}}], "for Thing b, .* has Thing a"),
        ([{"kind": "Other", "patch": {}}], "patch 1 .* is for Other, which"),
        ([{"kind": "Thing", "path": {}}], r"write \{kind: JobSet, patch:"),
        (
            [{"kind": "Thing", "patch": {"spec": {"none": None}}}],
            "patch 1 of manifest_patches.spec.none is null, but nothing is there",
        ),
        (
            [
                {
                    "kind": "Thing",
                    "patch": {"new": [{"name": "z", "$patch": "delete"}]},
                }
            ],
            "deletes 'z', which is not there",
        ),
        ({}, None),
    ],
)
def test_a_patch_that_changes_nothing_is_refused(value, message):
    if message is None:
        assert patch.patched([OBJECT], value) == [OBJECT]
        return
    with pytest.raises(errors.ConfigError, match=message):
        patch.patched([OBJECT], value)
