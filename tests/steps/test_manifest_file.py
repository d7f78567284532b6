import dataclasses
import json
import pathlib
import re

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt import steps
from elastic_ckpt.core import boxes, checked_json, digest, errors
from elastic_ckpt.steps import manifest, manifest_file
from tests.tiers import saved_worlds

ROOM = pathlib.Path(steps.__file__).parent
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "manifest_v1.json"

WHOLE = saved_worlds.contents(
    {"params/b": [], "params/empty": [3, 0], "params/w": [8, 4]},
    **{"data/cursors": 8, "data/state": 1},
)


def small():
    """A host with two of four parts of a matrix, a scalar, and two cursors."""
    parts = saved_worlds.grid([8, 4], [4, 1])
    held = [(2, parts[3]), (0, boxes.whole(())), (2, parts[1])]
    host = saved_worlds.host(1, 2, 4, rack="r7")
    files = [saved_worlds.data_file(2, 3)]
    whole = dataclasses.replace(WHOLE, time_ms=1_790_000_000_123, metrics='{"loss":2}')
    return saved_worlds.offer(host, whole, held, files=files, step=40).manifest


def whole_manifest():
    """The same host, of a step with trees and metadata."""
    trees = '{"shardings":[],"trees":{"params":{"b":"array","w":"numpy"}}}'
    manifest_of_host = small()
    contents = dataclasses.replace(
        manifest_of_host.contents, trees=trees, custom_metadata='{"note":"x"}'
    )
    return dataclasses.replace(manifest_of_host, contents=contents)


def rows(fragments):
    every = range(len(fragments.fragments))
    return [
        fragments.fragments.row(number, contents=fragments.contents) for number in every
    ]


def same(a, b):
    names = [field.name for field in dataclasses.fields(a) if field.name != "fragments"]
    return rows(a) == rows(b) and all(getattr(a, n) == getattr(b, n) for n in names)


@given(saved_worlds.saved(), st.randoms())
def test_a_manifest_is_read_as_it_was_written_and_has_one_content(offers, random):
    for offer in offers:
        parsed = offer.manifest
        text = manifest_file.to_bytes(parsed)
        assert same(manifest_file.parse(text), parsed)
        assert manifest_file.to_bytes(manifest_file.parse(text)) == text
        shuffled = rows(parsed)
        random.shuffle(shuffled)
        again = manifest.Fragments.from_rows(shuffled, contents=parsed.contents)
        assert (
            manifest_file.to_bytes(dataclasses.replace(parsed, fragments=again)) == text
        )


def test_version_1_has_these_bytes(golden):
    golden("manifest_v1.json", manifest_file.to_bytes(small()).decode())


def test_version_1_with_trees_has_these_bytes(golden):
    text = manifest_file.to_bytes(whole_manifest())
    golden("manifest_v1_trees.json", text.decode())
    assert same(manifest_file.parse(text), whole_manifest())


def test_the_first_version_still_loads():
    assert same(manifest_file.parse(GOLDEN.read_bytes()), small())


def test_version_1_with_parents_has_these_bytes(golden):
    parents = ((4, "000000000000001"), (39, "000000000000002"))
    whole = dataclasses.replace(small().contents, parents=parents)
    with_parents = dataclasses.replace(small(), contents=whole)
    text = manifest_file.to_bytes(with_parents)
    golden("manifest_v1_parents.json", text.decode())
    assert same(manifest_file.parse(text), with_parents)
    validate(text)


@pytest.mark.parametrize("parents", [[[1]], [["1", "2"]], [[1, 2]], 3])
def test_parents_that_are_none_are_refused(parents):
    content = json.loads(GOLDEN.read_bytes())
    del content["version"], content["digest"]
    text = checked_json.to_bytes({**content, "parents": parents}, version=1)
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(text)


def validate(text):
    schema = json.loads((ROOM / "schemas" / "manifest.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
@settings(max_examples=20)
@given(saved_worlds.saved())
def test_what_is_written_is_of_the_schema(offers):
    validate(manifest_file.to_bytes(offers[0].manifest))
    validate(manifest_file.to_bytes(whole_manifest()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"process": 3}, "'process' was unexpected"),
        ({"version": 2}, "1 was expected"),
        ({"step": -1}, "-1 is less than"),
        ({"leaves": [["w", [1]]]}, "too short"),
    ],
)
def test_the_schema_refuses_what_is_not_of_the_format(change, said):
    content = json.loads(GOLDEN.read_bytes())
    with pytest.raises(jsonschema.ValidationError, match=said):
        validate(json.dumps(content | change))


def test_the_page_names_every_field():
    page = (ROOM / "FORMAT.md").read_text()
    content = json.loads(manifest_file.to_bytes(whole_manifest()))
    names = {*content, "parents", *content["host"], *content["fragments"]}
    names |= {name for each in content["component_files"] for name in each}
    names |= {name for each in content["components"].values() for name in each}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_every_changed_added_or_missing_byte_is_noticed():
    text = GOLDEN.read_bytes()
    for place in range(len(text)):
        before, byte, after = text[:place], text[place], text[place + 1 :]
        changed = [before + bytes([byte ^ mask]) + after for mask in range(1, 256)]
        for spoilt in [*changed, before + after, before + b" " + text[place:]]:
            with pytest.raises(checked_json.UnreadableError):
                manifest_file.parse(spoilt)


def test_every_cut_is_noticed():
    text = GOLDEN.read_bytes()
    for end in range(len(text) - 2):
        with pytest.raises(checked_json.UnreadableError, match="is cut short"):
            manifest_file.parse(text[:end])
    with pytest.raises(checked_json.UnreadableError, match="layout differs"):
        manifest_file.parse(text[:-1])


def test_bytes_behind_the_end_are_not_reported_as_a_cut():
    text = GOLDEN.read_bytes()
    for more in (b"}", b"{}", text):
        with pytest.raises(checked_json.UnreadableError, match="goes on after its end"):
            manifest_file.parse(text + more)


def forged(**changes):
    """A manifest with other fields, and with the digest of these."""
    content = json.loads(manifest_file.to_bytes(small())) | changes
    del content["digest"]
    version = content.pop("version")
    return checked_json.to_bytes(content, version=version)


def fragments(**changes):
    return json.loads(manifest_file.to_bytes(small()))["fragments"] | changes


def component_file(**changes):
    (component_file,) = json.loads(manifest_file.to_bytes(small()))["component_files"]
    return [component_file | changes]


@pytest.mark.parametrize(
    "changes",
    [
        {"host": {"id": "../up", "number": 0, "domains": {}}},
        {"host": {"id": "a"}},
        {"host": None},
        {"values_digest": "crc32c"},
        {"leaves": [["w"]]},
        {"leaves": [["w", [1], "int8"], ["a", [1], "int8"]]},
        {"components": {"data/cursors": {}}},
        {"time_ms": "now"},
        {"metrics": "{"},
        {"metrics": "[]"},
        {"metrics": "[" * 10**5},
        {"metrics": {}},
        {"trees": "{"},
        {"trees": "[" * 10**5},
        {"trees": {}},
        {"custom_metadata": "[]"},
        {"fragments": {}},
        {"fragments": fragments(leaf=[0, 2, 3])},
        {"fragments": fragments(leaf=[0, 2])},
        {"fragments": fragments(start=[2, 0, 6])},
        {"fragments": fragments(start=[2])},
        {"fragments": fragments(stop=[4, 4, 9, 4])},
        {"fragments": fragments(start=[5, 0, 6, 0])},
        {"fragments": fragments(digest=["00"] * 3)},
        {"fragments": fragments(file=[0, 0, 1])},
        {"fragments": fragments(offset=[0, 100, -1])},
        {"fragments": fragments(stored_bytes=[0, 100])},
        {"fragments": fragments(files=["/etc/passwd"])},
        {"fragments": fragments(files=["a/../../b"])},
        {"component_files": component_file(path="../other")},
        {"component_files": component_file(component="rng")},
        {"component_files": component_file(parts=[2, 9])},
        {"component_files": component_file(digest="00")},
        {"component_files": component_file(stored_bytes=-1)},
    ],
)
def test_what_cannot_be_is_refused_though_its_digest_is_right(changes):
    assert forged() == GOLDEN.read_bytes()
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(forged(**changes))


@pytest.mark.parametrize("file", ["a/b//../c/0", "a//../../../etc/passwd", "a//.."])
def test_only_keys_of_stores_may_look_like_other_directories(file):
    text = forged(fragments=fragments(files=[file]))
    assert manifest_file.parse(text, stores=True).fragments.files == (file,)
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(text)
    outside = forged(fragments=fragments(files=[f"../{file}"]))
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(outside, stores=True)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: None, "is missing"),
        (lambda text: text[:50], r"is cut short \(after 50 bytes\)"),
        (lambda _: b"nonsense", "is not JSON"),
        (lambda _: b"[" * 100_000, "is not JSON"),
        (lambda _: b"{}", "is not a manifest"),
        (lambda text: text.replace(b"run-7", b"run-8"), "was altered"),
        (
            lambda _: forged(version=0),
            "has version 0, and this program reads version 1",
        ),
        (lambda _: forged(run="x"), "is that of run 'x', step 40 and host 'host-01'"),
        (lambda _: forged(step=41), "is that of run 'run-7', step 41 and"),
        (lambda _: forged(host={"id": "a", "number": 0, "domains": {}}), "host 'a'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named_with_the_way_out(
    tmp_path, spoil, said
):
    path = tmp_path / "40" / "manifest-host-01.json"
    path.parent.mkdir()
    manifest_file.write(path.parent, small())
    assert same(manifest_file.read(path, run="run-7", step=40), small())
    content = spoil(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.CheckpointError, match=said) as raised:
        manifest_file.read(path, run="run-7", step=40)
    message = str(raised.value)
    assert message.startswith(f"manifest {path} ")
    assert re.search("counts as lost: restore it from a copy, or remove", message)


def test_a_manifest_of_a_later_version_is_another_error(tmp_path):
    path = tmp_path / "manifest-host-01.json"
    path.write_bytes(forged(version=2))
    with pytest.raises(manifest_file.LaterVersionError, match="newer elastic_ckpt"):
        manifest_file.read(path, run="run-7", step=40)


def test_a_component_may_get_fields_that_this_version_does_not_know():
    components = json.loads(GOLDEN.read_bytes())["components"]
    components["data/state"]["sharing"] = "one a group"
    text = forged(components=components)
    validate(text)
    assert same(manifest_file.parse(text), small())


def test_equal_contents_of_many_hosts_are_one_object():
    first, second = (manifest_file.parse(GOLDEN.read_bytes()) for _ in range(2))
    assert first.contents is second.contents


@given(st.data())
def test_any_flipped_bit_of_values_changes_their_digest(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    kind = data.draw(
        st.sampled_from([np.float32, np.int8, np.bool_, ml_dtypes.bfloat16])
    )
    values = np.zeros(shape, kind)
    flat = np.frombuffer(bytearray(values.tobytes()), np.uint8).copy()
    flat[data.draw(st.integers(0, flat.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    spoilt = flat.view(values.dtype).reshape(shape)
    assert digest.values_digest(spoilt) != digest.values_digest(values)
    assert digest.values_digest(values.T.copy().T) == digest.values_digest(values)
