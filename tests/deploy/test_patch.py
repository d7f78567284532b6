"""Patches of objects."""

import copy

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import patch

ONE = {"name": "one", "image": "i", "ports": [{"containerPort": 1}]}
TWO = {"name": "two", "args": ["a", "b"]}
SOURCE = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
OBJECT = {
    "kind": "Thing",
    "metadata": {"name": "a", "labels": {"x": "1"}},
    "containers": [ONE, TWO],
    "env": [SOURCE, {"name": "B", "value": "$(A)"}],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Mappings are merged, and null removes a key.
        (
            {"metadata": {"labels": {"x": None, "y": "2"}}},
            {"metadata": {"name": "a", "labels": {"y": "2"}}},
        ),
        # Members with names or ports are merged, removed and added.
        (
            {
                "containers": [
                    {"name": "one", "ports": [{"containerPort": 2}]},
                    {"name": "two", "$patch": "delete"},
                    {"name": "three"},
                ]
            },
            {
                "containers": [
                    {**ONE, "ports": [{"containerPort": 1}, {"containerPort": 2}]},
                    {"name": "three"},
                ]
            },
        ),
        # A variable is replaced where it is.
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "C", "value": "2"}]},
            {
                "env": [
                    {"name": "A", "value": "1"},
                    OBJECT["env"][1],
                    {"name": "C", "value": "2"},
                ]
            },
        ),
        # Other lists are replaced.
        (
            {"containers": [{"name": "two", "args": ["c"]}]},
            {"containers": [ONE, {"name": "two", "args": ["c"]}]},
        ),
    ],
    ids=["mappings", "members", "variables", "lists"],
)
def test_a_patch_changes_what_it_names_in_the_object_that_it_names(change, expected):
    other = {**OBJECT, "metadata": {"name": "b"}}
    documents = [copy.deepcopy(OBJECT), other]
    patches = [{"kind": "Thing", "name": "a", "patch": change}]
    assert patch.patched(documents, patches) == [{**OBJECT, **expected}, other]
    assert documents == [OBJECT, other]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "Thing", "name": "b", "patch": {}}, "for Thing b, .* has Thing a"),
        ({"kind": "Other", "patch": {}}, "patch 1 .* is for Other, which"),
        ({"kind": "Thing", "path": {}}, r"write \{kind: JobSet, patch:"),
        ({"kind": "Thing", "patch": {"a": {"b": None}}}, r"patches\.a\.b is null, but"),
        (
            {"kind": "Thing", "patch": {"new": [{"name": "z", "$patch": "delete"}]}},
            "deletes 'z', which is not there",
        ),
    ],
)
def test_a_patch_that_changes_nothing_is_refused(value, message):
    with pytest.raises(errors.ConfigError, match=message):
        patch.patched([OBJECT], [value])
