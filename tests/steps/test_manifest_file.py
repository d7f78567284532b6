import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps import manifest, manifest_file
from tests import own_formats
from tests.tiers import saved_worlds


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


def forged(**changes):
    """A manifest with other fields, and with the digest of these."""
    content = json.loads(manifest_file.to_bytes(own_formats.manifest())) | changes
    del content["digest"]
    version = content.pop("version")
    return checked_json.to_bytes(content, version=version)


def fragments(**changes):
    return (
        json.loads(manifest_file.to_bytes(own_formats.manifest()))["fragments"]
        | changes
    )


def component_file(**changes):
    (component_file,) = json.loads(manifest_file.to_bytes(own_formats.manifest()))[
        "component_files"
    ]
    return [component_file | changes]


IMPOSSIBLE = {
    "host": [{"id": "../up", "number": 0, "domains": {}}, {"id": "a"}, None],
    "values_digest": ["crc32c"],
    "leaves": [[["w"]], [["w", [1], "int8"], ["a", [1], "int8"]]],
    "components": [{"data/cursors": {}}],
    "time_ms": ["now"],
    "metrics": ["{", "[]", "[" * 10**5, {}],
    "trees": ["{", "[" * 10**5, {}],
    "custom_metadata": ["[]"],
    "parents": [[[1]], [["1", "2"]], [[1, 2]], 3],
    "due": [1],
    "fragments": [
        {},
        fragments(leaf=[0, 2, 3]),
        fragments(leaf=[0, 2]),
        fragments(start=[2, 0, 6]),
        fragments(start=[2]),
        fragments(stop=[4, 4, 9, 4]),
        fragments(start=[5, 0, 6, 0]),
        fragments(start=[-1, 0, 6, 0]),
        fragments(digest=["00"] * 3),
        fragments(file=[0, 0, 1]),
        fragments(offset=[0, 100, -1]),
        fragments(stored_bytes=[0, 100]),
        fragments(files=["/etc/passwd"]),
        fragments(files=["a/../../b"]),
    ],
    "component_files": [
        component_file(path="../other"),
        component_file(component="rng"),
        component_file(parts=[2, 9]),
        component_file(parts=[3, 2]),
        component_file(digest="00"),
        component_file(stored_bytes=-1),
    ],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_refused_though_its_digest_is_right(name):
    manifest_file.parse(forged())
    for value in IMPOSSIBLE[name]:
        with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
            manifest_file.parse(forged(**{name: value}))


def test_a_manifest_of_another_run_step_or_host_is_refused(tmp_path):
    path = tmp_path / "manifest-host-01.json"
    for forgery, said in (
        (forged(run="x"), "is that of run 'x', step 40 and host 'host-01'"),
        (forged(step=41), "is that of run 'run-7', step 41 and"),
        (forged(host={"id": "a", "number": 0, "domains": {}}), "host 'a'"),
    ):
        path.write_bytes(forgery)
        with pytest.raises(errors.CheckpointError, match=said) as raised:
            manifest_file.read(path, run="run-7", step=40)
        assert "counts as lost: restore it from a copy, or remove" in str(raised.value)
    path.unlink()
    with pytest.raises(errors.CheckpointError, match="is missing; what it lists"):
        manifest_file.read(path, run="run-7", step=40)


def test_a_later_version_is_an_error_of_its_own_and_a_longer_file_no_cut(tmp_path):
    path = tmp_path / "manifest-host-01.json"
    path.write_bytes(forged(version=2))
    with pytest.raises(
        checked_json.LaterVersionError, match="later version of elastic_ckpt"
    ):
        manifest_file.read(path, run="run-7", step=40)
    with pytest.raises(checked_json.UnreadableError, match="Extra data"):
        manifest_file.parse(forged() + b"{}")
    with pytest.raises(checked_json.UnreadableError, match="layout differs"):
        manifest_file.parse(forged()[:-1])


def test_equal_contents_of_many_hosts_are_one_object():
    first, second = (manifest_file.parse(forged()) for _ in range(2))
    assert first.contents is second.contents


@pytest.mark.parametrize("file", ["a/b//../c/0", "a//../../../etc/passwd", "a//.."])
def test_only_keys_of_stores_may_look_like_other_directories(file):
    text = forged(fragments=fragments(files=[file]))
    assert manifest_file.parse(text, stores=True).fragments.files == (file,)
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(text)
    outside = forged(fragments=fragments(files=[f"../{file}"]))
    with pytest.raises(checked_json.UnreadableError, match="is not a manifest"):
        manifest_file.parse(outside, stores=True)
