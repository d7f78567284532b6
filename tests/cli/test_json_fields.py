"""The fields that programs read are frozen; tests/runs.py compares what is printed."""

from docs import json_fields


def test_fields_of_each_verb(golden):
    lines = []
    for call in json_fields.OUTPUTS:
        lines.append(f"{call}:")
        lines += [f"  {each.path}: {each.type}" for each in json_fields.fields(call)]
    golden("json_fields.txt", "\n".join(lines) + "\n")
