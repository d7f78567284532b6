"""A program may change its working directory between any two calls."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.inspect import status
from tests import corpora


@pytest.fixture
def move(tmp_path, monkeypatch):
    """Changes the directory to another one, which has nothing in it."""
    numbers = itertools.count()
    monkeypatch.chdir(tmp_path)

    def to_another():
        directory = tmp_path / f"elsewhere-{next(numbers)}"
        directory.mkdir()
        monkeypatch.chdir(directory)

    yield to_another
    left = tmp_path.glob("elsewhere-*/*")
    assert not list(left)


def test_what_was_given_by_a_relative_path_stays_where_it_is(tmp_path, move):
    texts = [{"text": f"text {n} " * 9} for n in range(99)]
    corpora.write_arrayrecord(tmp_path / "a.array_record", texts)
    tiers = [ec.Local("ram"), ec.Persistent("steps", every=2)]
    data = ec.data.from_config(grain_train_files="a.array_record", max_target_length=32)
    assert data.make_shard.parts[0].source.files == (f"{tmp_path}/a.array_record",)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    run = ec.RunDirectory("run", tiers=tiers, steps=4)
    move()
    with (
        run,
        contextlib.closing(ec.batches(data, mesh=mesh, global_batch_size=4)) as batches,
    ):
        move()
        with ec.Checkpointer(tiers, emit=run.emit) as checkpointer:
            for step in range(1, 5):
                move()
                parts = {"state": {"w": np.full(3, step)}, "data": batches}
                run.log(step, next(batches), loss=0.5)
                assert checkpointer.save_checkpointables(step, parts)
            move()
            checkpointer.record_metrics(4, {"loss": 1.0})
            move()
            assert checkpointer.delete(2)
            move()
    with ec.Checkpointer(tiers) as checkpointer:
        move()
        assert checkpointer.load_checkpointables(None, {"state": {"w": np.zeros(3)}})[
            "state"
        ]["w"].tolist() == [4, 4, 4]
        assert [each.step for each in checkpointer.checkpoints] == [4]
    assert sorted(each.name for each in (tmp_path / "steps").glob("[0-9]*")) == ["4"]
    assert status.collect(tmp_path / "run").step == 4


def test_a_follower_and_sources_stay_where_they_began(tmp_path, move):
    corpora.write_parquet(tmp_path / "a.parquet", [{"text": "a b"}] * 20)
    source = ec.data.Parquet(files=["a.parquet"], columns=("text",))
    with ec.Checkpointer([ec.Persistent("steps", every=1)]) as checkpointer:
        steps = ec.watch_steps("steps")
        move()
        assert checkpointer.save(1, {"w": np.ones(2)})
        for step in steps:
            move()
            assert step.load({"w": np.zeros(2)})["w"].tolist() == [1, 1]
            move()
            with ec.lease(step.path):
                move()
            break
    assert source.index(source.files[0]).block_records.sum() == 20
