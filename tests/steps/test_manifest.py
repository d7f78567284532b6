import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given

from elastic_ckpt.core import checked_blobs, checked_json, errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Manifest, Parts, read_manifest
from tests import own_formats
from tests.tiers import saved_worlds


@given(saved_worlds.saved())
def test_what_several_hosts_hold_is_one_manifest_that_is_read_as_it_was_written(saved):
    whole = Manifest.merged(saved)
    for each in [*saved, whole]:
        content = each.to_bytes()
        parsed = Manifest.parse(content)
        assert parsed.rows() == each.rows()
        for name in ("run", "step_id", "contents", "holders"):
            assert getattr(parsed, name) == getattr(each, name)
        assert parsed.to_bytes() == content
        # What is parsed of many hosts is one object.
        assert parsed.contents is Manifest.parse(content).contents
    assert [holder.host for holder in whole.holders] == [each.host for each in saved]
    for number, each in enumerate(saved):
        rows = np.flatnonzero(whole.parts.holder == number)
        taken = dataclasses.replace(whole, parts=whole.parts.take(rows))
        assert taken.rows() == each.rows()
        # The order in which a host lists its parts does not matter.
        again = Parts.of_rows(reversed(each.rows()), whole.contents)
        assert dataclasses.replace(each, parts=again).to_bytes() == each.to_bytes()


def forged(contents=None, columns=None, surplus=0, **changes):
    """A manifest with other fields, contents or columns, and the digest of these."""
    content = own_formats.manifest().to_bytes()
    fields, blobs = checked_blobs.parse(content, what="", version=manifest.VERSION)
    version = changes.pop("version", fields.pop("version"))
    del fields["sizes"]
    blobs[0] = json.dumps(json.loads(blobs[0]) | (contents or {})).encode()
    listed = np.frombuffer(blobs[1], np.int64).reshape(8, -1).copy()
    for number, column in (columns or {}).items():
        listed[number] = column
    blobs[1] = listed.tobytes() + b"?" * surplus
    return checked_blobs.to_bytes(fields | changes, blobs, version=version)


def leaf(path, **changes):
    shape = {"shape": [1], "dtype": "int8", "chunk": [1], "is_file": False}
    return {"path": path, **shape, **changes}


HOST = {"id": "a", "number": 0, "domains": {}}
IMPOSSIBLE = {
    "holders": [
        {"holders": [[{**HOST, "id": "../up"}, "local", ""]]},
        {"holders": [[HOST, "elsewhere", ""]]},
        {"holders": []},
        {"holders": None},
    ],
    "fields": [{"run": 3}, {"step_id": [1]}, {"step_id": ["1", "2"]}],
    "leaves": [
        {"contents": {"leaves": [each, *more]}}
        for each, *more in [
            [["w"]],
            [leaf("w"), leaf("a")],
            [leaf("w"), leaf("w")],
            [leaf("w", dtype="unknown")],
            [leaf("w", shape=[-2])],
            [leaf("w", chunk=[0])],
            [leaf("w", chunk=[1, 1])],
            [leaf("data/../../up", is_file=True)],
            [leaf("/etc/passwd", is_file=True)],
            [leaf("rng/key", is_file=True)],
            [leaf("data/a", is_file=True), leaf("w")],
        ]
    ],
    "contents": [
        {"contents": changes}
        for changes in [
            *[{"components": {"data": 1}}, {"time_ms": "now"}, {"is_due": 1}],
            *[{"metrics": each} for each in ("{", "[]", "[" * 10**5, {})],
            *[{"trees": each} for each in ("{", "[" * 10**5, {})],
            {"custom_metadata": "[]"},
            *[{"parents": each} for each in ([[1]], [["1", "2"]], [[1, 2]], 3)],
        ]
    ],
    "columns": [
        {"columns": {0: 1}},
        {"columns": {1: 9}},
        {"columns": {1: -1}},
        {"columns": {2: -1}},
        {"columns": {4: 10**6}},
        {"columns": {2: 1, 4: 0}},
        {"surplus": 8},
        {"surplus": 3},
    ],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_refused_though_its_digest_is_right(name):
    Manifest.parse(forged())
    for changes in IMPOSSIBLE[name]:
        with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
            Manifest.parse(forged(**changes))


def test_a_manifest_that_is_not_the_one_or_not_whole_is_refused(tmp_path):
    path, content = tmp_path / "manifest-host-01", forged()
    for forgery, said in (
        (forged(run="x"), "belongs to run 'x', step 40 and host 'host-01'"),
        (forged(step_id=[41, "1"]), "belongs to run 'run-7', step 41 and"),
        (forged(holders=[[HOST, "local", ""]]), "host 'a'"),
        *((spoilt, "truncated or altered") for spoilt in (b"", content[:-1])),
        *((each, "truncated or altered") for each in (content + b"{}", b"?" + content)),
    ):
        path.write_bytes(forgery)
        with pytest.raises(errors.CheckpointError, match=said) as raised:
            read_manifest(path, run="run-7", step=40)
        assert "parts count as lost; restore it from a good copy" in str(raised.value)
    path.write_bytes(forged(version=2))
    with pytest.raises(
        checked_json.LaterVersionError, match="later version of elastic"
    ):
        read_manifest(path, run="run-7", step=40)
    path.unlink()
    with pytest.raises(errors.CheckpointError, match="is missing; its parts"):
        read_manifest(path, run="run-7", step=40)
