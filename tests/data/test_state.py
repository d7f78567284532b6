import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import state

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


def test_the_first_version_still_loads(tmp_path, request):
    golden = request.path.parent.parent / "golden" / "data_state_v1.json"
    (tmp_path / state.FILE_NAME).write_bytes(golden.read_bytes())
    assert state.read(tmp_path) == STATE


def test_a_missing_state_is_named_with_the_way_out(tmp_path):
    directory = tmp_path / "40" / "data"
    with refused(r"40/data/data_state\.json is missing; .* move .*/40 out of"):
        state.read(directory)


@given(st.data())
def test_every_cut_is_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("state")
    content = state.to_bytes(STATE)
    cut = data.draw(st.integers(0, len(content) - 3))
    (directory / state.FILE_NAME).write_bytes(content[:cut])
    with refused(r"is cut short \(after"):
        state.read(directory)


@given(st.data())
def test_every_flipped_bit_is_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("state")
    content = bytearray(state.to_bytes(STATE))
    # White space between JSON values carries nothing.
    places = [n for n, byte in enumerate(content) if byte not in b" \n"]
    content[data.draw(st.sampled_from(places))] ^= 1 << data.draw(st.integers(0, 7))
    (directory / state.FILE_NAME).write_bytes(content)
    with refused(state.FILE_NAME):
        state.read(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a data state"),
        (b"{}", "is not a data state"),
        (b'{"version": 2}', "has version 2, and this program reads version 1"),
        (b'{"version": 1}', "was altered"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path, content, message):
    (tmp_path / state.FILE_NAME).write_bytes(content)
    with refused(message):
        state.read(tmp_path)


def test_another_pipeline_is_named_part_by_part():
    current = json.loads(json.dumps(STATE.pipeline))
    state.check_same_pipeline(STATE, "positional", current)
    changed = current | {"data_shuffle_seed": 1, "max_target_length": 8}
    with refused(
        r"data_shuffle_seed: saved 0, now 1; max_target_length: saved null, now 8.*"
        " set these keys back, or start a new run_name"
    ):
        state.check_same_pipeline(STATE, "positional", changed)
    with refused('engine: saved "positional", now "sharded"'):
        state.check_same_pipeline(STATE, "sharded", current)
