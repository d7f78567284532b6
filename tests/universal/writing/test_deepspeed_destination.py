"""Conversions to DeepSpeed's universal format, also after kills."""

import json
import os

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.reading import reused_memory
from elastic_ckpt.universal.writing import chunks, conversion, convert, writer
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values
from tests.universal.writing import killed, load_with_deepspeed, small_model

STATES = ("master", "first_moment", "second_moment")


SAME_NAMES = """\
version: 1
rules:
  - from: {"{name:path}": "..."}
    to: {"{name}": "..."}
"""


@pytest.fixture
def unpacked(tmp_path):
    return lambda name: stored_values.unpacked(f"deepspeed/{name}.tar.xz", tmp_path)


def job(source, target, **options):
    return conversion.Job(
        source=str(source), target=str(target), to="deepspeed", **options
    )


def held(path):
    """The values of all states of an optimizer, by name and kind."""
    return {
        (each.name, each.kind): stored_values.read(each)
        for each in opening.open_checkpoint(path).tensors
        if each.kind in (*STATES, "step")
    }


def assert_same(written, expected):
    assert written.keys() == expected.keys()
    for key, array in expected.items():
        assert written[key].shape == array.shape, key
        assert written[key].dtype == array.dtype, key
        assert written[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("sample", ["zero1_tp2_pp2_dp2", "zero2_dp4", "zero3_dp4"])
def test_ranks_become_what_deepspeed_converts_them_to(
    tmp_path, unpacked, sample, monkeypatch
):
    # Parameters take turns in the memory of others, as large ones do.
    monkeypatch.setattr(reused_memory, "_LEAST_BYTES", 1)
    convert.convert(job(unpacked(sample), tmp_path / "made"))
    by_deepspeed = unpacked(f"{sample}_universal")
    made = held(tmp_path / "made")
    steps = {made.pop(key).item() for key in list(made) if key[1] == "step"}
    assert steps == {2}
    expected = {
        key: array for key, array in held(by_deepspeed).items() if key[1] != "step"
    }
    if sample == "zero3_dp4":
        # DeepSpeed's conversion of ZeRO-3 lacks them.
        for name in ("frozen", "scale"):
            del made[name, "master"]
    assert_same(made, expected)
    assert (tmp_path / "made" / "global_step2" / "zero").is_dir()


def test_ranks_that_load_the_copy_cut_it_as_those_that_saved_it(tmp_path, unpacked):
    convert.convert(job(unpacked("zero1_tp2_pp2_dp2"), tmp_path / "made"))
    by_deepspeed = unpacked("zero1_tp2_pp2_dp2_universal")
    made, expected = (
        opening.open_checkpoint(path).values
        for path in (tmp_path / "made", by_deepspeed)
    )
    for name, kind in held(by_deepspeed):
        if kind == "master":
            for fact, default in (
                ("cat_dim", 0),
                ("param_n_sub_params", 1),
                ("vocab_tensor", False),
            ):
                key = f"parameters/{name}/{fact}"
                assert made.get(key, default) == expected.get(key, default), key
    assert made["parameters/1.dense.weight/cat_dim"] == 1


def test_a_universal_checkpoint_is_copied_with_what_ranks_need(tmp_path, unpacked):
    source = unpacked("zero1_tp2_pp2_dp2_universal")
    convert.convert(job(source, tmp_path / "made"))
    assert_same(held(tmp_path / "made"), held(source))
    values = opening.open_checkpoint(tmp_path / "made").values
    assert values["parameters/1.dense.weight/cat_dim"] == 1


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_state_of_jax_becomes_states_of_the_parameters_of_deepspeed(
    tmp_path, unpacked
):
    # DeepSpeed itself loads it, see `load_with_deepspeed`.
    load_with_deepspeed.convert_from_jax(tmp_path, tmp_path / "made")
    expected = {
        key: array
        for key, array in held(unpacked("zero1_dp2")).items()
        if key[0] != "scale"
    }
    made = held(tmp_path / "made")
    name = "embed.words.weight"
    array = kv.padded(kv.known("fp32", name, (kv.VOCAB, kv.EMBED)), 8)
    assert made[name, "master"].tobytes() == array.tobytes()
    assert_same(made, expected)


def test_weights_of_a_model_become_masters(tmp_path):
    tensors = small_model.tensors(2, 16)
    tensors["empty.weight"] = np.zeros((0, 3), np.float32)
    small_model.write(tmp_path / "source", tensors)
    convert.convert(job(tmp_path / "source", tmp_path / "made"))
    expected = {(name, "master"): array for name, array in tensors.items()}
    assert_same(held(tmp_path / "made"), expected)


def test_a_copy_that_was_cut_short_is_continued(tmp_path, unpacked, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**12)
    monkeypatch.setattr(writer.Destination, "most_unit_bytes", 2**12)
    source = unpacked("zero1_dp2")
    killed.convert(job(source, tmp_path / "made"), 3)
    assert not (tmp_path / "made").exists()
    unfinished = tmp_path / "made.unfinished"
    records = sorted((tmp_path / "made.written").glob("0*.json"))
    assert len(records) == 3
    listed = [list(json.loads(each.read_bytes())["files"]) for each in records]
    damaged = unfinished / listed[0][0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (damaged.parent / "left.pt").write_bytes(b"half")
    kept = [name for names in listed[1:] for name in names]
    times = {name: (unfinished / name).stat().st_mtime_ns for name in kept}
    done = []
    convert.convert(
        job(source, tmp_path / "made"), progress=lambda *each: done.append(each)
    )
    assert 0 < done[0][0] < done[-1][0] == done[-1][1]
    for name, time_ns in times.items():
        assert (tmp_path / "made" / name).stat().st_mtime_ns == time_ns
    convert.convert(job(source, tmp_path / "again"))
    assert_same(held(tmp_path / "made"), held(tmp_path / "again"))
    assert not list((tmp_path / "made").rglob("left.pt"))
    assert not [*tmp_path.glob("*.unfinished"), *tmp_path.glob("*.written")]


def test_a_copy_of_another_source_is_not_continued(tmp_path, unpacked):
    killed.convert(job(unpacked("zero1_dp2"), tmp_path / "made"), 3)
    source = unpacked("zero2_dp4")
    convert.convert(job(source, tmp_path / "made"))
    convert.convert(job(source, tmp_path / "again"))
    assert_same(held(tmp_path / "made"), held(tmp_path / "again"))
    assert not list(tmp_path.glob("made.*"))


def test_storage_that_fails_is_one_error_and_nothing_is_visible(
    tmp_path, unpacked, monkeypatch
):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    given = job(unpacked("zero1_dp2"), tmp_path / "made")
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(errors.CheckpointError, match="No space left on device"):
        convert.convert(given)
    assert not (tmp_path / "made").exists()


def test_what_exists_is_not_replaced(tmp_path, unpacked):
    (tmp_path / "made").mkdir()
    with pytest.raises(errors.CheckpointError, match="exists already"):
        convert.convert(job(unpacked("zero1_dp2"), tmp_path / "made"))
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path, unpacked):
    source = unpacked("zero1_tp2_pp2_dp2")
    convert.convert(job(source, tmp_path / "one"))
    convert.convert(job(source, tmp_path / "two"), num_processes=2)
    assert_same(held(tmp_path / "two"), held(tmp_path / "one"))


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("params/w", "no master/<parameter>"),
        ("w", "no state that DeepSpeed restores"),
        ("parameter/w", "no state that DeepSpeed restores"),
        ("master/a/w", "cannot be the name"),
        ("first_moment/w", "no master/<parameter>"),
    ],
)
def test_targets_that_deepspeed_does_not_restore_are_refused(tmp_path, target, match):
    small_model.write(tmp_path / "source", {"w": np.ones(3, np.float32)})
    rules = f'version: 1\nrules:\n  - from: {{"w": "x"}}\n    to: {{"{target}": "x"}}\n'
    (tmp_path / "layout.yml").write_text(rules)
    given = job(tmp_path / "source", "made", rules=str(tmp_path / "layout.yml"))
    with pytest.raises(errors.CheckpointError, match=match):
        convert.convert(given)


def test_moments_without_a_step_are_refused(tmp_path):
    values = np.ones(3, np.float32)
    small_model.write(tmp_path / "source", {"w": values, "m": values})
    rules = (
        'version: 1\nrules:\n  - from: {"w": "x"}\n    to: {"master/w": "x"}\n'
        '  - from: {"m": "x"}\n    to: {"first_moment/w": "x"}\n'
    )
    (tmp_path / "layout.yml").write_text(rules)
    given = job(
        tmp_path / "source", tmp_path / "made", rules=str(tmp_path / "layout.yml")
    )
    with pytest.raises(errors.CheckpointError, match="no step of the optimizer"):
        convert.convert(given)


@pytest.mark.parametrize("step", [[np.nan], [np.inf], [-3.0], [1.5], []])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path, step):
    tensors = {"master/w": np.ones(3, np.float32), "step/w": np.array(step, np.float32)}
    small_model.write(tmp_path / "source", tensors)
    (tmp_path / "layout.yml").write_text(SAME_NAMES)
    given = job(
        tmp_path / "source", tmp_path / "made", rules=str(tmp_path / "layout.yml")
    )
    with pytest.raises(errors.CheckpointError, match="which is no number of steps"):
        convert.convert(given)


def test_two_targets_of_one_file_are_refused(tmp_path):
    tensors = dict.fromkeys(["master/w", "fp32/w"], np.ones(3, np.float32))
    small_model.write(tmp_path / "source", tensors)
    (tmp_path / "layout.yml").write_text(SAME_NAMES)
    given = job(
        tmp_path / "source", tmp_path / "made", rules=str(tmp_path / "layout.yml")
    )
    with pytest.raises(errors.CheckpointError, match=r"2 targets have the file w/fp32"):
        convert.convert(given)


def test_buckets_are_refused(unpacked):
    with pytest.raises(errors.CheckpointError, match="not a local directory"):
        convert.convert(job(unpacked("zero1_dp2"), "gs://bucket/made"))
