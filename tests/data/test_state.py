import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import pipeline_changes, state

STATE = state.DataState(
    engine="positional",
    position={"global_next_index": 960},
    pipeline={"data_shuffle_seed": 0, "grain_train_files": [["texts", 131072, 100]]},
)


def refused(match):
    return pytest.raises(errors.DataError, match=match)


def test_a_state_is_read_as_it_was_written(tmp_path):
    state.write(tmp_path, STATE)
    assert state.read(tmp_path) == STATE


def test_version_1_has_these_bytes(golden):
    golden("data_state_v1.json", state.to_bytes(STATE).decode())


def test_a_missing_state_is_named_with_the_way_out(tmp_path):
    directory = tmp_path / "40" / "data"
    with refused(r"40/data/data_state\.json is missing; .* move .*/40 out of"):
        state.read(directory)


@given(st.data())
def test_every_cut_and_every_flipped_bit_is_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("state")
    content = bytearray(state.to_bytes(STATE))
    cut = data.draw(st.integers(0, len(content) - 3))
    (directory / state.FILE_NAME).write_bytes(content[:cut])
    with refused(r"is cut short \(after"):
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
    return {"seed": 1, pipeline_changes.DATASETS: datasets}


def check(before, now):
    saved = state.DataState(engine="sharded", position={}, pipeline=before)
    state.check_same_pipeline(saved, "sharded", now)


WEB, CODE = source(["a", 10, 1, "x"], weight=0.5), source(["b", 20, 2, "y"], weight=1)


@pytest.mark.parametrize(
    "now",
    [
        {"web": WEB, "code": CODE},
        {"web": WEB | {"weight": 7.0}, "code": CODE},
        {"web": WEB},
        {"code": CODE, "books": source(["c", 1, 1, "z"], weight=2)},
    ],
    ids=["the same", "another weight", "one gone", "one new and one gone"],
)
def test_weights_and_datasets_of_a_mixture_may_change(now):
    check(mixed(web=WEB, code=CODE), mixed(**now))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"web": WEB | {"files": []}, "code": CODE}, "datasets.web.files: a is gone"),
        (
            {"web": source(["a", 11, 1, "x"], weight=0.5)},
            "datasets.web.files: a had 10 bytes and 1 records, now 11 and 1",
        ),
        (
            {"web": WEB | {"format": "tfrecord"}},
            'datasets.web.format: saved "parquet", now "tfrecord"',
        ),
        ({"books": WEB}, "datasets: saved ['code', 'web'], now ['books']"),
    ],
    ids=["a file less", "a file changed", "another format", "none in common"],
)
def test_what_a_dataset_reads_may_not_change(now, message):
    with refused(re.escape(message)):
        check(mixed(web=WEB, code=CODE), mixed(**now))


def test_many_changed_files_are_counted():
    now = source(*([name, 1, 1, "x"] for name in "cdefghij"), weight=0.5)
    with refused(r"a is gone; .*c is new.*f is new; .*and 4 more changes"):
        check(mixed(web=WEB), mixed(web=now))


def test_files_in_another_order_are_named():
    one, two = ["a", 1, 1, "x"], ["b", 1, 1, "x"]
    with refused("files: the files are in another order"):
        check(mixed(web=source(one, two)), mixed(web=source(two, one)))
