import contextlib
import dataclasses
import gzip
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, state

STATE = state.DataState(
    engine="positional",
    position={"global_next_index": 960},
    pipeline={"data_shuffle_seed": 0, "grain_train_files": [["texts", 131072, 100]]},
)


def refused(match):
    return pytest.raises(errors.DataError, match=match)


@pytest.fixture
def path(tmp_path):
    """The file of a state."""
    state.write(tmp_path, STATE)
    return tmp_path / state.FILE_NAME


def test_version_1_has_these_bytes(path, golden):
    golden("data_state_v1.json", path.read_text())


def test_a_missing_state_is_named_with_the_way_out(tmp_path):
    directory = tmp_path / "40" / "data"
    with refused(r"40/data/data_state\.json is missing; .* move .*/40 out of"):
        state.read(directory)


@given(st.data())
def test_every_cut_and_every_flipped_bit_is_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("state")
    state.write(directory, STATE)
    content = bytearray((directory / state.FILE_NAME).read_bytes())
    cut = data.draw(st.integers(0, len(content) - 3))
    (directory / state.FILE_NAME).write_bytes(content[:cut])
    with refused("is cut short"):
        state.read(directory)
    # White space between JSON values carries nothing.
    offsets = [n for n, byte in enumerate(content) if byte not in b" \n"]
    content[data.draw(st.sampled_from(offsets))] ^= 1 << data.draw(st.integers(0, 7))
    (directory / state.FILE_NAME).write_bytes(content)
    with refused(state.FILE_NAME):
        state.read(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not JSON"),
        (b"{}", "is not a data state"),
        (b'{"version": 2}', "has version 2, and this program reads version 1"),
        (b'{"version": 1}', "was altered"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path, content, message):
    (tmp_path / state.FILE_NAME).write_bytes(content)
    with refused(message):
        state.read(tmp_path)


def test_what_is_left_out_is_read_as_it_was_written(tmp_path, golden):
    left_out = dataclasses.replace(STATE, left_out=((8, 16), (32, 64)))
    state.write(tmp_path, left_out)
    assert state.read(tmp_path) == left_out
    content = (tmp_path / state.FILE_NAME).read_text()
    golden("data_state_v1_left_out.json", content)


def source(*files, **more):
    return {"format": "parquet", "files": list(files), **more}


def mixed(**datasets):
    return {"seed": 1, state.DATASETS: datasets}


def check(before, now):
    saved = state.DataState(engine="sharded", position={}, pipeline=before)
    state.check_same_pipeline(saved, "sharded", now)


WEB, CODE = source(["a", 10, 1, "x"], weight=0.5), source(["b", 20, 2, "y"], weight=1)


@pytest.mark.parametrize(
    "now",
    [
        {"web": WEB | {"weight": 7.0}, "code": CODE},
        {"code": CODE, "books": source(["c", 1, 1, "z"], weight=2)},
    ],
)
def test_weights_and_datasets_of_a_mixture_may_change(now):
    check(mixed(web=WEB, code=CODE), mixed(**now))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"web": WEB | {"files": []}, "code": CODE}, "datasets.web.files: a is gone"),
        (
            {"web": source(["a", 11, 1, "x"], weight=0.5)},
            "datasets.web.files: a had 10 bytes and 1 records, now 11 and 1, with",
        ),
        (
            {"web": WEB | {"format": "tfrecord"}},
            'datasets.web.format: saved "parquet", now "tfrecord"',
        ),
        ({"books": CODE | {"format": "text"}}, "saved ['code', 'web'], now ['books']"),
    ],
)
def test_what_a_dataset_reads_may_not_change(now, message):
    with refused(re.escape(message)):
        check(mixed(web=WEB, code=CODE), mixed(**now))


def test_many_changed_files_are_counted():
    now = source(*([name, 1, 1, "x"] for name in "cdefghij"), weight=0.5)
    with refused(r"a is gone; .*c is new.*f is new; .*and 4 more changes"):
        check(mixed(web=WEB), mixed(web=now))


def test_a_dataset_of_another_name_and_the_same_files_is_refused():
    for now in ({"internet": WEB, "code": CODE}, {"internet": WEB, "web": CODE}):
        with refused("web is now named internet, with the same files and steps; rest"):
            check(mixed(web=WEB, code=CODE), mixed(**now))


def test_of_steps_of_one_name_the_one_that_differs_is_named():
    def steps(*sizes):
        return {"steps": [{"name": "Window", "size": size} for size in sizes]}

    with refused("Window 2.size: saved 5, now 6"):
        check(steps(4, 5), steps(4, 6))


def test_only_stages_that_have_begun_may_not_change():
    def staged(*lengths):
        begins = [10 * number for number in range(len(lengths))]
        stages = [{"length": each} for each in lengths]
        return {"begin_steps": begins, "stages": stages}

    between = state.pipeline_changes
    assert between(staged(1, 2), staged(1, 3), step=3, begun=1) == []
    assert between(staged(1, 2), staged(1, 3), step=13, begun=2) == [
        "stages[1].length: saved 2, now 3"
    ]


def test_a_stage_gives_no_name_of_before_to_other_files():
    def staged(*parts):
        begins = [10 * number for number in range(len(parts))]
        return {"begin_steps": begins, "stages": [mixed(**each) for each in parts]}

    before = staged({"web": WEB, "code": CODE})
    now = staged({"code": CODE}, {"web": source(["c", 1, 1, "z"], weight=1)})
    with refused(r"\(datasets.web.files: a is gone; datasets.web.files: c is new\)"):
        check(before, now)
    check(before, staged({"code": CODE}, {"web": WEB}))


def test_settings_in_one_another_and_files_of_one_name_are_told_apart():
    def described(tokenizer, *files):
        return {"tokenizer": {"kind": tokenizer}, **source(*files)}

    one, two = ["part", 10, 1, "x"], ["part", 20, 2, "y"]
    with refused('tokenizer.kind: saved "bytes", now "sp"'):
        check(described("bytes", one, two), described("sp", one, two))
    with refused("files: part is gone"):
        check(described("bytes", one, two), described("bytes", one))
    with refused("part had 20 bytes and 2 records, now 21 and 2"):
        check(
            described("bytes", one, two),
            described("bytes", one, ["part", 21, 2, "y"]),
        )


# The cursors of shards.

POSITION = {"batches": [[24, 3], [12, 2]]}
CURSORS = {shard: {"next_index": 10 * shard} for shard in range(8)}


def part(*shards):
    return {shard: CURSORS[shard] for shard in shards}


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.sets(st.integers(0, 7)))
def test_any_host_reads_any_shards_whoever_wrote_them(tmp_path_factory, owners, wanted):
    directory = tmp_path_factory.mktemp("cursors")
    for host in range(4):
        mine = [shard for shard, owner in enumerate(owners) if owner == host]
        cursors.write(directory, part(*mine), POSITION)
    assert cursors.read(directory, wanted, POSITION) == part(*wanted)


def test_a_reader_opens_no_file_without_its_shards(tmp_path):
    cursors.write(tmp_path, part(0, 1), POSITION)
    (tmp_path / "shards-00002-00007.json.gz").write_text("spoilt")
    assert cursors.read(tmp_path, [0, 1], POSITION) == part(0, 1)
    with refused("shards-00002-00007.json.gz is cut short, or is not gzip"):
        cursors.read(tmp_path, [1, 2], POSITION)


@given(st.data())
def test_changed_cursors_are_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cursors")
    cursors.write(directory, part(0, 1), POSITION)
    path = directory / "shards-00000-00001.json.gz"
    content = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:cut])
    with refused("shards-00000-00001.json.gz is cut short"):
        cursors.read(directory, [0, 1], POSITION)
    offset = data.draw(st.integers(0, len(content) - 1))
    content[offset] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    # Some bits carry nothing, such as one of the header.
    with contextlib.suppress(errors.DataError):
        assert cursors.read(directory, [0, 1], POSITION) == part(0, 1)


def test_equal_cursors_have_equal_bytes(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        cursors.write(tmp_path / name, part(0, 1), POSITION)
    (one,), (other,) = ((tmp_path / name).iterdir() for name in ("one", "other"))
    # When it was written would be in bytes 4 to 7.
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes()[4:8] == bytes(4)


def test_missing_shards_are_named(tmp_path):
    cursors.write(tmp_path, part(0, 1, 4), POSITION)
    with refused(r"lacks 2 of 4 logical shards: \[2, 3\]; restore their files"):
        cursors.read(tmp_path, [1, 2, 3, 4], POSITION)


def test_a_file_of_another_step_is_named(tmp_path):
    cursors.write(tmp_path, part(0, 1), {"batches": [[24, 2]]})
    with refused("the file is from another step"):
        cursors.read(tmp_path, [0], POSITION)


def test_a_renamed_file_is_named(tmp_path):
    cursors.write(tmp_path, part(0, 1), POSITION)
    (tmp_path / "shards-00000-00001.json.gz").rename(
        tmp_path / "shards-00002-00004.json.gz"
    )
    with refused("2 shards, not to .* shards 2 to 4"):
        cursors.read(tmp_path, [3], POSITION)


def test_cursors_have_these_bytes(tmp_path, golden):
    values = {3: None, 4: {"next_index": 7}, 5: {"next_index": 9}}
    cursors.write(tmp_path, values, POSITION)
    content = (tmp_path / "shards-00003-00005.json.gz").read_bytes()
    # The same content may be compressed to other bytes elsewhere.
    golden("cursors_v1.json", gzip.decompress(content).decode())


SIMPLE = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
)
INNER = SIMPLE | st.lists(SIMPLE) | st.dictionaries(st.text(), SIMPLE)
JSON = SIMPLE | st.lists(INNER) | st.dictionaries(st.text(), INNER)


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
