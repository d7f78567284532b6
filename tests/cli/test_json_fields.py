"""The fields that programs read are frozen; tests/runs.py compares what is printed."""

import argparse
import json

import pytest

from docs import json_fields
from elastic_ckpt.cli import main
from tests import json_outputs

PROBLEM = {
    **{"kind": "damaged", "step": 1, "save": "", "part": "", "tier": "", "holder": ""},
    **{"path": "", "why": "", "remedy": ""},
}
VERIFIED = {"run": "a", "passed": False, "steps": [], "problems": [PROBLEM]}


def test_the_fields_of_each_verb(golden):
    lines = []
    for call in json_fields.OUTPUTS:
        lines.append(f"{call}:")
        lines += [f"  {each.path}: {each.type}" for each in json_fields.fields(call)]
    golden("json_fields.txt", "\n".join(lines) + "\n")


def test_every_verb_that_prints_json_is_listed():
    (verbs,) = (
        action
        for action in main.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    with_json = {
        verb
        for verb, parser in verbs.choices.items()
        if "--json" in parser._option_string_actions
    }
    assert with_json == {call.split()[0] for call in json_fields.OUTPUTS}


def test_every_field_has_a_meaning():
    for call in json_fields.OUTPUTS:
        for each in json_fields.fields(call):
            assert each.meaning, f"{call}: {each.path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"more": 1}, ".more is unknown"),
        ({"passed": 1}, ".passed: 1 is no"),
        ({"steps": [{}]}, ".steps[].save is missing"),
        ({"problems": [PROBLEM | {"kind": "odd"}]}, ".problems[].kind: 'odd'"),
    ],
)
def test_other_output_than_the_listed_one_is_found(change, named):
    json_outputs.check("verify", json.dumps(VERIFIED))
    with pytest.raises(AssertionError) as caught:
        json_outputs.check("verify", json.dumps(VERIFIED | change))
    assert named in str(caught.value)
