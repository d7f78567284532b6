"""The contract of every iterator of global batches, in process and colocated.

Subclasses define how to make one, and from which data. The claims are those of the
training loop and of Orbax's `StatefulCheckpointable`.
"""

import asyncio
import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import elastic_data, iterator, rows

GLOBAL_BATCH_SIZE = 16


class Created:
    """Orbax's promise of a directory, kept at once."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = epath.Path(path)

    async def await_creation(self) -> epath.Path:
        return self._path


def run(coroutine):
    async def both():
        await (await coroutine)

    asyncio.run(both())


def ids(batch):
    return elastic_data.join_ids(np.asarray(batch["example_id"])).tolist()


class IteratorContract:
    def make(self, data):
        """An iterator of `data` on the mesh."""
        return iterator.Batches(
            data,
            mesh=topology.mesh_of(topology.present(2)),
            global_batch_size=GLOBAL_BATCH_SIZE,
        )

    @pytest.fixture
    def batches(self, data):
        made = self.make(data)
        yield made
        made.close()

    def expected(self, data, *sizes):
        """The batches of these sizes, on one host."""
        batches, position, cursors = [], None, None
        for size in sizes:
            host = data.host_batches(rows.in_order(1, size)[0])
            if position:
                held = dict(cursors)
                host.go_to(
                    position, lambda shards, held=held: {s: held[s] for s in shards}
                )
            batches.append(next(host))
            position, cursors = host.get_state()
        return batches

    def test_batches_are_those_of_the_pipeline_row_for_row(self, batches, data):
        over_the_mesh = topology.batch_sharding(topology.mesh_of(topology.present(2)))
        for expected in self.expected(data, *[GLOBAL_BATCH_SIZE] * 8):
            batch = next(batches)
            assert batch.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name], array)
                sharding = batch[name].sharding
                assert sharding.is_equivalent_to(over_the_mesh, array.ndim)

    def test_the_state_before_every_batch_can_be_returned_to(
        self, batches, data, tmp_path
    ):
        expected = self.expected(data, *[GLOBAL_BATCH_SIZE] * 8)

        async def save_and_go_on(directory, batch):
            writing = await batches.save(Created(directory))
            # What is written later is the state of the moment of the save.
            assert ids(next(batches)) == ids(batch)
            directory.mkdir()
            await writing

        for number, batch in enumerate(expected):
            asyncio.run(save_and_go_on(tmp_path / str(number), batch))
        for number, batch in reversed(list(enumerate(expected))):
            run(batches.load(epath.Path(tmp_path / str(number))))
            assert ids(next(batches)) == ids(batch)
        next(batches)
        batches.reset()
        assert ids(next(batches)) == ids(expected[0])

    def test_orbax_saves_it_and_loads_it_with_the_weights(
        self, batches, data, tmp_path
    ):
        weights = {"w": jax.numpy.arange(4.0)}
        expected = self.expected(data, GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE)
        with ocp.training.Checkpointer(tmp_path / "steps") as checkpointer:
            next(batches)
            checkpointer.save_checkpointables(1, {"state": weights, "data": batches})
            next(batches)
            next(batches)
            loaded = checkpointer.load_checkpointables(
                1, {"state": weights, "data": batches}
            )
        np.testing.assert_array_equal(loaded["state"]["w"], weights["w"])
        assert ids(next(batches)) == ids(expected[1])

    def test_batches_can_change_their_size_on_the_way(self, batches, data, tmp_path):
        sizes = [16, 16, 8, 24, 16]
        expected = self.expected(data, *sizes)
        for size, batch in zip(sizes, expected, strict=True):
            batches.resize(size)
            actual = next(batches)
            assert actual.keys() == batch.keys()
            for name, array in batch.items():
                np.testing.assert_array_equal(actual[name], array)
            run(batches.save(Created(tmp_path)))
        # The saved state does not contain the size.
        run(batches.load(epath.Path(tmp_path)))
        batches.resize(8)
        (*_, later) = self.expected(data, *sizes, 8)
        assert ids(next(batches)) == ids(later)

    def test_rows_since_an_older_state_can_be_left_out(self, batches, data, tmp_path):
        expected = self.expected(data, *[GLOBAL_BATCH_SIZE] * 6)
        for number in (0, 1):
            next(batches)
            (tmp_path / str(number)).mkdir()
            run(batches.save(Created(tmp_path / str(number))))
        next(batches)
        next(batches)
        run(batches.leaving_out().load(epath.Path(tmp_path / "1")))
        assert batches.left_out == ((32, 64),)
        # The position has not changed.
        assert ids(next(batches)) == ids(expected[4])
        run(batches.save(Created(tmp_path)))
        # Once more, to a step from before the first time.
        run(batches.leaving_out().load(epath.Path(tmp_path / "0")))
        assert batches.left_out == ((16, 80),)
        assert ids(next(batches)) == ids(expected[5])
        run(batches.load(epath.Path(tmp_path)))
        assert batches.left_out == ((32, 64),)
        assert ids(next(batches)) == ids(expected[5])
        run(batches.leaving_out().load(epath.Path(tmp_path)))
        assert batches.left_out == ((32, 64), (80, 96))
        # Rows before a later state cannot be left out.
        batches.reset()
        later = "position 32, which is after the run's current position, 0"
        with pytest.raises(errors.DataError, match=later):
            run(batches.leaving_out().load(epath.Path(tmp_path / "1")))
        assert batches.left_out == ()

    def test_a_spoilt_state_is_refused_and_the_position_stays(
        self, batches, data, tmp_path
    ):
        expected = self.expected(data, GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE)
        next(batches)
        (tmp_path / "data_state.json").write_text('{"version": 1')
        with pytest.raises(errors.DataError, match="is truncated"):
            run(batches.load(epath.Path(tmp_path)))
        assert ids(next(batches)) == ids(expected[1])

    def test_the_state_of_another_pipeline_is_refused(self, batches, data, tmp_path):
        run(batches.save(Created(tmp_path)))
        other_data, difference = self.other(data)
        other = self.make(other_data)
        with pytest.raises(errors.DataError, match=difference):
            run(other.load(epath.Path(tmp_path)))
        other.close()

    def other(self, data):
        """Other data that fits the same mesh, and how it differs, in words."""
        changed = {"length": 16, "seed": 0}
        other = dataclasses.replace(data, pipeline={"pipeline": changed})
        return other, "pipeline.seed: saved 7, now 0"
