import json

import pytest

from elastic_ckpt.steps import manifest, placement
from elastic_ckpt.tiers.peers import node_record, world_record

RECORD = world_record.WorldRecord(
    run="run",
    hosts=(manifest.Host(id="a.0", number=0, domains={"rack": "r"}),),
    policy=placement.Policy(copies=1, domain="rack"),
    limit_bytes=9,
)


def test_a_world_is_read_as_it_was_noted(tmp_path):
    assert world_record.read(tmp_path) is None
    world_record.write(tmp_path, RECORD)
    assert world_record.read(tmp_path) == RECORD


def test_a_program_of_another_version_may_have_more_fields_or_fewer(tmp_path):
    world_record.write(tmp_path, RECORD)
    path = tmp_path / world_record.FILE
    fields = json.loads(path.read_bytes())
    for values in (fields, fields["policy"], *fields["hosts"]):
        values["later"] = 1
    for earlier in ("tls_ca", "max_bytes_per_sec"):
        del fields[earlier]
    path.write_text(json.dumps(fields))
    assert world_record.read(tmp_path) == RECORD


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"run": "run", "hosts": [1]}'])
def test_a_spoilt_record_is_none(tmp_path, text):
    (tmp_path / world_record.FILE).write_text(text)
    assert world_record.read(tmp_path) is None


def test_a_request_of_a_later_version_is_read(tmp_path):
    path = tmp_path / node_record.REQUEST_FILE
    path.write_text(json.dumps(["id", 9, "later"]))
    assert node_record.read_request(tmp_path) == node_record.Request("id", 9)
    path.write_text(json.dumps(["id"]))
    assert node_record.read_request(tmp_path) is None
