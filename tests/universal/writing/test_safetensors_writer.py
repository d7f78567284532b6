"""Safetensors checkpoints written from boxes, by several processes, after kills."""

import os
import pathlib
import signal
import tempfile
import weakref

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal.formats import safetensors_checkpoint, safetensors_file
from elastic_ckpt.universal.writing import safetensors_writer, tensor_file
from tests.universal.safetensors_files import bits, read
from tests.universal.writing import killed, random_tensors

Writer = safetensors_writer.SafetensorsWriter


def model(num_tensors=8, size=40):
    generator = np.random.default_rng(num_tensors)
    return {
        f"layers.{n}.weight": generator.random((size, size), np.float32)
        for n in range(num_tensors)
    }


def loaded(directory):
    """All tensors of a checkpoint, as its index lists them."""
    arrays = read(directory)
    files = set()
    checkpoint = safetensors_checkpoint.open_checkpoint(directory)
    for each in checkpoint.tensors:
        files |= {fragment.file for fragment in each.fragments}
    assert {tensor.name for tensor in checkpoint.tensors} == arrays.keys()
    return arrays


def write(directory, arrays, plan, *, num_hosts=1, **options):
    reading = random_tensors.reader(arrays, **options)
    for host in range(num_hosts):
        writer = Writer(directory, plan, source="a", host=host, num_hosts=num_hosts)
        writer.write(reading)
    writer.commit({"config.json": b"{}"})


@hypothesis.given(
    random_tensors.tensors(),
    st.integers(0, 300),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_tensors_come_back_with_their_bits_however_they_are_cut(
    arrays, most_file_bytes, num_hosts, seed, transposed
):
    with tempfile.TemporaryDirectory() as parent:
        directory = pathlib.Path(parent, "model")
        plan = random_tensors.plan_of(arrays, most_file_bytes=most_file_bytes)
        write(
            directory,
            arrays,
            plan,
            num_hosts=num_hosts,
            seed=seed,
            transposed=transposed,
        )
        assert bits(loaded(directory)) == bits(arrays)
        assert os.listdir(parent) == ["model"]
        expected = {file.name for file in plan.files} | {"config.json"}
        if plan.index is not None:
            expected.add("model.safetensors.index.json")
        assert set(os.listdir(directory)) == expected


@pytest.mark.parametrize("run_bytes", [1, 2**10, 2**30])
def test_long_and_short_runs_give_the_same_file(run_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_LEAST_RUN_BYTES", run_bytes)
    arrays = {"a": np.random.default_rng(0).random((24, 3, 32)), "b": np.ones(())}
    plan = random_tensors.plan_of(arrays)
    for seed in range(5):
        directory = tmp_path / str(seed)
        write(directory, arrays, plan, seed=seed)
        assert bits(loaded(directory)) == bits(arrays)


def test_a_thread_holds_one_box_at_a_time(tmp_path):
    arrays = model(num_tensors=4)
    alive = most = 0

    class Values(np.ndarray):
        """An array that can be counted."""

    def on_freed():
        nonlocal alive
        alive -= 1

    def read(names):
        nonlocal alive, most
        for name, box, values in random_tensors.reader(arrays, 3)(names):
            counted = values.view(Values)
            weakref.finalize(counted, on_freed)
            alive += 1
            most = max(most, alive)
            yield name, box, counted

    plan = random_tensors.plan_of(arrays, most_file_bytes=7000)
    writer = Writer(tmp_path / "model", plan, source="a", num_threads=2)
    writer.write(read)
    writer.commit()
    assert len(plan.files) == 4
    # While the next box is made, both sides still have the one before.
    assert most <= 2 * 2
    assert bits(loaded(tmp_path / "model")) == bits(arrays)


def kill_after(directory, num_boxes):
    """Writes the model and is killed after so many boxes."""
    arrays = model()
    done = 0

    def read(names):
        nonlocal done
        for each in random_tensors.reader(arrays)(names):
            yield each
            done += 1
            if done == num_boxes:
                os.kill(os.getpid(), signal.SIGKILL)

    plan = random_tensors.plan_of(arrays, most_file_bytes=7000)
    Writer(directory, plan, source="a", num_threads=1).write(read)


@pytest.mark.parametrize("num_boxes", [1, 12, 20])
def test_a_write_that_was_killed_continues_with_the_files_that_are_missing(
    num_boxes, tmp_path
):
    directory, arrays = tmp_path / "model", model()
    plan = random_tensors.plan_of(arrays, most_file_bytes=7000)
    killed.run(kill_after, directory, num_boxes)
    assert not directory.exists()
    whole = {path.stem for path in (tmp_path / "model.written").glob("*.json")}
    asked = []

    def read(names):
        asked.extend(names)
        return random_tensors.reader(arrays)(names)

    done = []
    writer = Writer(directory, plan, source="a")
    kept = writer.write(read, progress=lambda *done_of: done.append(done_of))
    assert set(kept) == whole
    assert len(asked) == len(arrays) - len(kept)
    assert done[-1] == (plan.num_bytes, plan.num_bytes)
    writer.commit()
    assert bits(loaded(directory)) == bits(arrays)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "record", "source"])
def test_a_file_that_is_not_as_it_was_written_is_written_again(damage, tmp_path):
    directory, arrays = tmp_path / "model", model()
    plan = random_tensors.plan_of(arrays, most_file_bytes=7000)
    Writer(directory, plan, source="a").write(random_tensors.reader(arrays))
    name = plan.files[2].name
    file = tmp_path / "model.unfinished" / name
    record = tmp_path / "model.written" / f"{name}.json"
    content = bytearray(file.read_bytes())
    match damage:
        case "flipped":
            content[-7] ^= 4
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-7])
        case "missing":
            file.unlink()
        case "record":
            record.write_bytes(record.read_bytes()[:-9])
    source = "b" if damage == "source" else "a"
    writer = Writer(directory, plan, source=source)
    kept = writer.write(random_tensors.reader(arrays))
    names = {file.name for file in plan.files}
    assert set(kept) == (set() if damage == "source" else names - {name})
    writer.commit()
    assert bits(loaded(directory)) == bits(arrays)


def test_nothing_is_committed_before_all_have_written(tmp_path):
    directory, arrays = tmp_path / "model", model()
    plan = random_tensors.plan_of(arrays, most_file_bytes=7000)
    writer = Writer(directory, plan, source="a", host=0, num_hosts=2)
    writer.write(random_tensors.reader(arrays))
    with pytest.raises(errors.CheckpointError, match="lacks 4 of 8 files"):
        writer.commit()
    assert not directory.exists()


def test_an_existing_checkpoint_is_not_replaced(tmp_path):
    arrays = model()
    plan = random_tensors.plan_of(arrays)
    write(tmp_path / "model", arrays, plan)
    with pytest.raises(errors.CheckpointError, match="exists already"):
        Writer(tmp_path / "model", plan, source="a")


WRONG = {
    "lacks": lambda listed: listed[:-1],
    "twice": lambda listed: [*listed, listed[0]],
    "float64": lambda listed: [(n, box, v.astype(float)) for n, box, v in listed],
    "nothing is planned": lambda listed: [("w", box, v) for _, box, v in listed],
    "was read for": lambda listed: [(n, boxes.whole((1, 1)), v) for n, _, v in listed],
}


@pytest.mark.parametrize("problem", WRONG)
def test_boxes_that_do_not_cover_the_tensors_are_refused_by_name(problem, tmp_path):
    arrays = model(num_tensors=2)
    reading = random_tensors.reader(arrays, 1)
    writer = Writer(tmp_path / "model", random_tensors.plan_of(arrays), source="a")
    with pytest.raises(errors.CheckpointError, match=problem):
        writer.write(lambda names: WRONG[problem](list(reading(names))))
    assert not list((tmp_path / "model.unfinished").iterdir())


def test_values_that_read_back_differently_are_an_error(tmp_path, monkeypatch):
    arrays = model(num_tensors=2)
    put = tensor_file.TensorFile.put

    def put_badly(opened, span, box, values):
        values = values.copy()
        values.reshape(-1)[0] += 1
        put(opened, span, box, values)

    monkeypatch.setattr(tensor_file.TensorFile, "put", put_badly)
    writer = Writer(tmp_path / "model", random_tensors.plan_of(arrays), source="a")
    with pytest.raises(errors.CheckpointError, match="reads back other values"):
        writer.write(random_tensors.reader(arrays))


@pytest.mark.parametrize("most_file_bytes", [7000, 10**6])
@pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)
def test_a_checkpoint_in_a_bucket_exists_when_it_is_committed(bucket, most_file_bytes):
    arrays = model(num_tensors=3)
    plan = random_tensors.plan_of(arrays, most_file_bytes=most_file_bytes)
    url = f"{bucket}/model"
    reading = random_tensors.reader(arrays)
    Writer(url, plan, source="a", host=0, num_hosts=2).write(reading)
    # Another attempt keeps them.
    writer = Writer(url, plan, source="a")
    kept = writer.write(reading)
    own = plan.files_of(0, num_hosts=2)
    assert kept == sorted(file.name for file in own)
    writer.commit()
    with pytest.raises(errors.CheckpointError, match="exists already"):
        Writer(url, plan, source="a")
    checkpoint = safetensors_checkpoint.open_checkpoint(url)
    assert {tensor.name for tensor in checkpoint.tensors} == arrays.keys()
    values = {}
    for file in plan.files:
        values |= safetensors_file.read(f"{url}/{file.name}")
    assert bits(values) == bits(arrays)
