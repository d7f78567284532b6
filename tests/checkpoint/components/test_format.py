"""The files of a component: schemas, golden bytes, and files of the first version."""

import base64
import dataclasses
import io
import json
import pathlib

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from elastic_ckpt.checkpoint.components import description, encoding, state_file
from elastic_ckpt.core import checked_json, errors
from tests.checkpoint.components.test_encoding import LEAVES, Point, same

ROOM = pathlib.Path(encoding.__file__).parent
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
DESCRIPTION = description.Description(
    pattern="per_group",
    axes=("data",),
    states=("group-model-0", "group-model-1"),
    hosts=4,
    kind="builtins.dict",
    on_resize="from_first",
    required=True,
)
STATE = {
    "lr": 0.1,
    "ema": (np.array([1.5, -2.0], ml_dtypes.bfloat16), None),
    "steps": [3, True, "text", np.int64(7)],
}


def validate(content, kind):
    schema = json.loads((ROOM / "schemas" / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)


def tree_file(state):
    """The JSON in the file of a state."""
    content = state_file.to_bytes(encoding.encode(state))
    with np.load(io.BytesIO(content)) as archive:
        return json.loads(archive["state"].tobytes())


def test_version_1_has_these_bytes(golden):
    golden("component_v1.json", description.to_bytes(DESCRIPTION).decode())
    content = state_file.to_bytes(encoding.encode(STATE))
    golden("component_state_v1.txt", base64.encodebytes(content).decode())


def test_the_first_version_still_loads():
    kept = (GOLDEN / "component_v1.json").read_bytes()
    assert description.from_bytes(kept) == DESCRIPTION
    before = (GOLDEN / "component_v1_before_rules.json").read_bytes()
    without = dataclasses.replace(DESCRIPTION, on_resize=None, required=None)
    assert description.from_bytes(before) == without
    assert description.to_bytes(without) == before
    kept = base64.decodebytes((GOLDEN / "component_state_v1.txt").read_bytes())
    same(encoding.decode(state_file.from_bytes(kept)), STATE)


def test_what_is_written_is_of_the_schemas():
    validate(json.loads(description.to_bytes(DESCRIPTION)), "component")
    validate(tree_file([LEAVES, Point(1, 2)]), "state")


def test_the_schemas_refuse_what_is_not_of_the_format():
    content = json.loads(description.to_bytes(DESCRIPTION))
    with pytest.raises(jsonschema.ValidationError):
        validate({**content, "states": ["process-3"]}, "component")
    content = tree_file(STATE)
    with pytest.raises(jsonschema.ValidationError):
        validate({**content, "tree": {"pickle": "gASVAA=="}}, "state")


def test_another_version_is_refused_with_its_number(tmp_path):
    later = checked_json.to_bytes(vars(DESCRIPTION), version=2)
    (tmp_path / description.FILE).write_bytes(later)
    with pytest.raises(errors.CheckpointError, match="has version 2"):
        description.read(epath.Path(tmp_path))


def test_a_changed_description_is_refused(tmp_path):
    changed = description.to_bytes(DESCRIPTION).replace(b'"hosts": 4', b'"hosts": 5')
    (tmp_path / description.FILE).write_bytes(changed)
    with pytest.raises(errors.CheckpointError, match="its digest differs"):
        description.read(epath.Path(tmp_path))
