import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.data import cursors

POSITION = {"stream_row": 96}
CURSORS = {shard: {"next_index": 10 * shard} for shard in range(8)}


def refused(match):
    return pytest.raises(errors.DataError, match=match)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def part(*shards):
    return {shard: CURSORS[shard] for shard in shards}


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.sets(st.integers(0, 7)))
def test_any_host_reads_any_shards_whoever_wrote_them(tmp_path_factory, owners, wanted):
    directory = tmp_path_factory.mktemp("cursors")
    for host in range(4):
        mine = [shard for shard, owner in enumerate(owners) if owner == host]
        cursors.write(directory, part(*mine), POSITION)
    assert cursors.read(directory, wanted, POSITION) == part(*wanted)


def test_files_are_named_by_the_range_of_adjacent_shards(tmp_path):
    cursors.write(tmp_path, part(0, 1, 2, 5, 7), POSITION)
    assert names(tmp_path) == [
        "shards-00000-00002.json",
        "shards-00005-00005.json",
        "shards-00007-00007.json",
    ]


def test_a_reader_opens_no_file_without_its_shards(tmp_path):
    cursors.write(tmp_path, part(0, 1), POSITION)
    (tmp_path / "shards-00002-00007.json").write_text("spoilt")
    assert cursors.read(tmp_path, [0, 1], POSITION) == part(0, 1)
    with refused("shards-00002-00007.json is not JSON"):
        cursors.read(tmp_path, [1, 2], POSITION)


def test_missing_shards_are_named(tmp_path):
    cursors.write(tmp_path, part(0, 1, 4), POSITION)
    with refused(r"lacks 2 of 4 logical shards: \[2, 3\]; restore their files"):
        cursors.read(tmp_path, [1, 2, 3, 4], POSITION)


def test_doubled_shards_are_named(tmp_path):
    cursors.write(tmp_path, part(0, 1, 2), POSITION)
    cursors.write(tmp_path, part(2, 3), POSITION)
    with refused(r"logical shards \[2\] twice, the second time in shards-00002-00003"):
        cursors.read(tmp_path, range(4), POSITION)


def test_a_file_of_another_step_is_named(tmp_path):
    cursors.write(tmp_path, part(0, 1), {"stream_row": 48})
    with refused("the file is from another step"):
        cursors.read(tmp_path, [0], POSITION)


def test_a_renamed_file_is_named(tmp_path):
    cursors.write(tmp_path, part(0, 1), POSITION)
    (tmp_path / "shards-00000-00001.json").rename(tmp_path / "shards-00002-00004.json")
    with refused("2 shards, not to .* shards 2 to 4"):
        cursors.read(tmp_path, [3], POSITION)


def test_version_2_has_these_bytes(tmp_path, golden):
    values = {3: None, 4: {"next_index": 7}, 5: {"next_index": 9}}
    cursors.write(tmp_path, values, POSITION)
    golden("cursors_v2.json", (tmp_path / "shards-00003-00005.json").read_text())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def order(value):
    """A value in which the order of keys counts."""
    if isinstance(value, dict):
        return [(key, order(each)) for key, each in value.items()]
    if isinstance(value, list):
        return list(map(order, value))
    return type(value), value


@settings(max_examples=10)
@given(st.lists(JSON, min_size=1, max_size=3))
def test_every_value_is_read_as_it_was(tmp_path_factory, values):
    directory = tmp_path_factory.mktemp("cursors")
    cursors.write(directory, dict(enumerate(values)), POSITION)
    found = cursors.read(directory, range(len(values)), POSITION)
    assert [order(found[shard]) for shard in range(len(values))] == list(
        map(order, values)
    )


@pytest.mark.parametrize(
    "spoilt",
    [
        {"cursors": [[0, 1], [1, 7]]},
        {"cursors": [[0], [1]]},
        {"cursors": [[0], 7]},
        {"shapes": None},
    ],
)
def test_a_file_that_is_not_of_the_format_is_named(tmp_path, spoilt):
    cursors.write(tmp_path, {0: None, 1: {"next_index": 7}}, POSITION)
    path = tmp_path / "shards-00000-00001.json"
    content = json.loads(path.read_text())
    fields = {name: content[name] for name in ("position", "shapes", "cursors")}
    path.write_bytes(checked_json.to_bytes(fields | spoilt, version=2))
    with refused("shards-00000-00001.json do not have the format of their version 2"):
        cursors.read(tmp_path, [0, 1], POSITION)
