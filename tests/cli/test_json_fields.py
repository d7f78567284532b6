"""The fields that programs read are frozen; tests/runs.py compares what is printed."""

import argparse

from docs import json_fields
from elastic_ckpt.cli import main


def test_fields_of_each_verb(golden):
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
