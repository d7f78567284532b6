"""Holes in templates, and the data about clouds."""

import datetime

import pytest

from elastic_ckpt.deploy import template


def test_a_hole_that_is_all_of_a_text_becomes_its_value():
    values = {"number": 0, "text": "a", "members": [1], "fields": {"b": {}}}
    holes = {name: f"${{{name}}}" for name in values}
    assert template.fill(holes, values) == values
    assert template.fill(list(holes.values()), values) == list(values.values())


def test_a_hole_within_a_text_becomes_text():
    words = ["exit ${code} of ${name}", "$(POD_IP)", "${LONG%.*}", "${words[@]}"]
    filled = template.fill(words, {"code": 78, "name": "a"})
    assert filled == ["exit 78 of a", *words[1:]]


@pytest.mark.parametrize("value", [None, "", False, [], {}])
def test_a_hole_without_a_value_leaves_out_what_has_nothing_else(value):
    document = {
        "kept": {},
        "empty": [],
        "gone": {"rules": [{"count": "${hole}"}]},
        "some": [{"count": "${hole}", "name": "a"}, "${hole}"],
    }
    filled = template.fill(document, {"hole": value})
    assert filled == {"kept": {}, "empty": [], "some": [{"name": "a"}]}
    assert template.fill(document["gone"], {"hole": value}) is None


def test_a_value_is_no_template():
    value = {"name": "${other}", "empty": {"hole": ""}}
    assert template.fill(["${hole}"], {"hole": value}) == [value]


def test_a_hole_that_nothing_fills_is_a_defect():
    with pytest.raises(KeyError, match="hole"):
        template.fill({"a": ["${hole}"]}, {})


def test_what_is_known_of_a_cloud_has_its_source_and_date():
    clouds = template.read("clouds.yaml")
    networks = clouds.pop("gpu_direct").values()
    for each in (*clouds.values(), *networks):
        assert each["source"]
        assert isinstance(each["date"], datetime.date)
        assert each["machines"]
