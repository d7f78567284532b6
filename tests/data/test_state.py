import contextlib
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, state

STATE = state.DataState(
    engine="positional",
    position={"global_next_index": 960},
    pipeline={"data_shuffle_seed": 0},
    left_out=((8, 16), (32, 64)),
    progress=state.Progress(step=20, begun=2),
)
POSITION = {"batches": [[24, 3], [12, 2]]}


def part(*shards):
    """The cursors of some shards."""
    return {shard: {"row": 10 * shard, "state": {}} for shard in shards}


def refused(match):
    return pytest.raises(errors.DataError, match=match)


FILES = {
    "data_state.json": (lambda path: state.write(path, STATE), state.read, STATE),
    "shards-00000-00001.json.gz": (
        lambda path: cursors.write(path, part(0, 1), POSITION),
        lambda path: cursors.read(path, [0, 1], POSITION),
        part(0, 1),
    ),
}


@pytest.mark.parametrize("name", FILES)
@given(st.data())
def test_every_cut_and_every_flipped_bit_is_noticed(tmp_path_factory, name, data):
    directory = tmp_path_factory.mktemp("state")
    write, read, expected = FILES[name]
    write(directory)
    content = bytearray((directory / name).read_bytes())
    cut = data.draw(st.integers(0, len(content) - 3))
    (directory / name).write_bytes(content[:cut])
    with refused(f"{name} is truncated"):
        read(directory)
    offset = data.draw(st.integers(0, len(content) - 1))
    content[offset] ^= 1 << data.draw(st.integers(0, 7))
    (directory / name).write_bytes(content)
    # Some bits carry nothing: white space, and some of gzip's header.
    with contextlib.suppress(errors.DataError):
        assert read(directory) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"40/data/data_state\.json is missing; .* move .*/40 out of"),
        (b"\xff\xfe", "is not JSON"),
        (b"{}", "is not a data state"),
        (b'{"version": 2}', "has format version 2, but this release reads version 1"),
        (b'{"version": 1}', "was altered"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path, content, message):
    directory = tmp_path / "40" / "data"
    directory.mkdir(parents=True)
    if content is not None:
        (directory / state.FILE_NAME).write_bytes(content)
    with refused(message):
        state.read(directory)


def test_a_reader_needs_the_files_of_its_shards_alone(tmp_path):
    cursors.write(tmp_path, part(0, 1), POSITION)
    (tmp_path / "shards-00005-00007.json.gz").write_text("spoilt")
    assert cursors.read(tmp_path, [0, 1], POSITION) == part(0, 1)
    with refused("shards-00005-00007.json.gz is truncated or is not gzip"):
        cursors.read(tmp_path, [1, 5], POSITION)
    with refused(r"lacks 2 of 3 logical shards: \[2, 3\]; restore their files"):
        cursors.read(tmp_path, [1, 2, 3], POSITION)
    with refused("00001.json.gz has position .* all parts .* from the same step"):
        cursors.read(tmp_path, [0], {"batches": [[24, 2]]})
    (tmp_path / "shards-00000-00001.json.gz").rename(
        tmp_path / "shards-00002-00004.json.gz"
    )
    with refused(r"lacks 1 of 1 logical shards: \[3\]"):
        cursors.read(tmp_path, [3], POSITION)


def source(*files, **more):
    return {"format": "parquet", "files": list(files), **more}


def mixed(**datasets):
    return {"seed": 1, state.DATASETS: datasets}


def staged(*stages):
    begins = [10 * number for number in range(len(stages))]
    return {"begin_steps": begins, "stages": list(stages)}


def steps(*sizes):
    return {"steps": [{"name": "Window", "size": size} for size in sizes]}


ONE, TWO = ["a", 10, 1, "x"], ["b", 20, 2, "y"]
WEB, CODE = source(ONE, weight=0.5), source(TWO, weight=1)
BOTH = mixed(web=WEB, code=CODE)
LATER = source(*([name, 1, 1, "z"] for name in "cdefghij"), weight=0.5)
RENAMED = "web is now named internet, with the same files and steps; restore"


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        # Weights may change, and datasets may come and go.
        (BOTH, mixed(web=WEB | {"weight": 7.0}, code=CODE), None),
        (BOTH, mixed(code=CODE, books=LATER), None),
        (BOTH, mixed(books=LATER), "saved ['code', 'web'], now ['books']"),
        (BOTH | {"num_epoch": 1}, mixed(web=WEB) | {"num_epoch": 1}, "now ['web']"),
        # What a dataset reads may not change, nor its name.
        (BOTH, mixed(web=WEB | {"files": []}), "(datasets.web.files: a is gone)"),
        (
            BOTH,
            mixed(web=source(["a", 11, 1, "x"], weight=0.5)),
            "files: a had 10 bytes and 1 records, now has 11 and 1, with different",
        ),
        (BOTH, mixed(web=WEB | {"format": "text"}), 'saved "parquet", now "text"'),
        (BOTH, mixed(web=LATER), "f is new; datasets.web.files: and 4 more changes"),
        (BOTH, mixed(internet=WEB, code=CODE), RENAMED),
        (BOTH, mixed(internet=WEB, web=CODE), RENAMED),
        # Files of one name.
        (source(ONE, ONE), source(ONE), "(files: a is gone)"),
        (source(ONE, TWO), source(TWO, ONE), "the files are in a different order)"),
        (source(ONE, ONE), source(ONE, TWO), "files: a is gone; files: b is new"),
        # Settings inside one another.
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c: saved 1, now 2"),
        ({"a": {}}, {"a": ""}, 'a: saved {}, now ""'),
        ({"a": {"files": [["x"]]}}, {"a": {"files": [["y"]]}}, 'saved [["x"]], now'),
        (steps(4, 5), steps(4, 6), "(Window 2.size: saved 5, now 6)"),
        # Of stages, those that have begun are compared: here the first.
        (staged({"length": 1}, {"length": 2}), staged({"length": 1}), None),
        (
            staged({"length": 1}, {"length": 2}),
            staged({"length": 3}, {"length": 2}),
            "(stages[0].length: saved 1, now 3)",
        ),
        (staged(BOTH), staged(mixed(code=CODE), mixed(web=WEB)), None),
        (
            staged(BOTH),
            staged(mixed(code=CODE), mixed(web=LATER)),
            "(datasets.web.files: a is gone; datasets.web.files: c is new",
        ),
    ],
)
def test_what_may_differ_at_a_resume_and_what_may_not(before, now, message):
    saved = state.DataState(engine="sharded", position={}, pipeline=before)
    with refused(re.escape(message)) if message else contextlib.nullcontext():
        state.check_same_pipeline(saved, "sharded", now)


def test_stages_that_have_begun_stay():
    before = staged({"length": 1}, {"length": 2})
    now = staged({"length": 1}, {"length": 3})
    for begun, changes in ((1, []), (2, ["stages[1].length: saved 2, now 3"])):
        assert state.pipeline_changes(before, now, step=3, begun=begun) == changes


def test_a_state_of_another_engine_is_refused():
    with refused('engine: saved "positional", now "sharded"'):
        state.check_same_pipeline(STATE, "sharded", STATE.pipeline)


def test_the_end_of_a_shard_is_newer_than_its_last_restart_point_and_none_is_oldest():
    of_rows = [{"row": n, what: {}} for n in (0, 2) for what in ("state", "ended")]
    for older, newer in itertools.combinations([None, *of_rows], 2):
        for both in ((older, newer), (newer, older)):
            assert cursors.newest({7: each} for each in both) == {7: newer}
