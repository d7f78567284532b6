import asyncio
import json

import jax
import numpy as np
import pytest

from elastic_ckpt.checkpoint import checkpointer, summary
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, metrics, topology
from elastic_ckpt.data import iterator


class Heard:
    """An Emit that remembers."""

    def __init__(self):
        self.events = []

    def __call__(self, name, **fields):
        events.check(name, fields)
        self.events.append((name, fields))

    def names(self):
        return [name for name, _ in self.events]


@pytest.fixture
def batches(data):
    mesh, _ = topology.make_mesh(2)
    return iterator.Batches(data, mesh=mesh, global_batch_size=16)


@pytest.fixture
def make(tmp_path, batches):
    made = []

    def make(data=batches, emit=events.nobody, **section):
        section = schema.CheckpointSection(**{"checkpoint_period": 2, **section})
        run = checkpointer.RunCheckpointer(tmp_path, section, data=data, emit=emit)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()


def state(value=0.0):
    mesh, _ = topology.make_mesh(2)
    weights = np.arange(16, dtype=np.float32) + value
    return {"w": jax.device_put(weights, topology.batch_sharding(mesh))}


def abstract(tree):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
    )


def saved_steps(directory):
    return list(summary.steps(directory))


def test_a_step_holds_weights_and_data_and_comes_back_with_both(make, batches):
    run = make()
    next(batches)
    run.save(2, state(5.0))
    expected = next(batches)
    run.close()
    again = make()
    assert again.latest_step == 2
    restored = again.restore(abstract(state()))
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    assert restored["w"].sharding == state()["w"].sharding
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])


def test_a_checkpoint_is_due_each_period_and_at_the_end(make):
    run = make(checkpoint_period=3)
    due = [step for step in range(1, 9) if run.is_due(step, last=step == 8)]
    assert due == [3, 6, 8]
    unfinished = make(checkpoint_period=3, save_checkpoint_on_completion=False)
    assert not unfinished.is_due(8, last=True)


def test_the_last_step_is_not_saved_twice(make):
    run = make()
    run.save(2, state())
    assert not run.is_due(2, last=True)


def test_the_newest_are_kept(make, tmp_path):
    run = make(max_num_checkpoints_to_keep=2)
    for step in (2, 4, 6, 8):
        run.save(step, state())
    run.close()
    assert saved_steps(tmp_path) == [6, 8]


def test_the_end_of_each_save_is_told(make):
    heard = Heard()
    run = make(emit=heard, async_checkpointing=False)
    run.save(2, state())
    assert heard.names() == ["save_started", "saved"]
    run = make(emit=heard)
    run.save(4, state())
    run.close()
    assert heard.names()[2:] == ["save_started", "saved"]


def test_saves_and_restores_are_measured(make, heard):
    run = make(async_checkpointing=False)
    run.save(2, state())
    run.save(4, state())
    of_saves = [
        heard[metric]
        for metric in (metrics.CHECKPOINT_SAVE, metrics.CHECKPOINT_SAVE_BLOCK)
    ]
    assert list(map(len, of_saves)) == [2, 2]
    for saved, blocked in zip(*of_saves, strict=True):
        # Nothing is left to the background here.
        assert 0 < saved <= blocked
    run.restore(abstract(state()))
    assert len(heard[metrics.CHECKPOINT_LOAD]) == 1


class Failing:
    """A data iterator whose disk is full."""

    async def save(self, directory):
        async def write():
            await directory.await_creation()
            raise OSError("disk full")

        return write()

    async def load(self, directory):
        raise NotImplementedError


def test_a_step_without_data_state_does_not_exist_and_the_error_is_raised(
    make, tmp_path
):
    run = make(data=Failing())
    run.save(2, state())
    with pytest.raises(OSError, match="disk full"):
        run.close()
    assert saved_steps(tmp_path) == []
    assert [s.step for s in checkpointer.interrupted_steps(tmp_path)] == [2]


def test_an_interrupted_step_is_told_passed_over_and_cleaned_away(make, tmp_path):
    run = make()
    run.save(2, state())
    run.close()
    half = tmp_path / "4.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    heard = Heard()
    run = make(emit=heard)
    assert run.latest_step == 2
    assert heard.events == [
        ("step_interrupted", {"step": 4, "path": str(half), "resume_step": 2})
    ]
    run.save(4, state())
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]


def test_a_step_that_orbax_declines_is_an_error_not_a_silence(make, monkeypatch):
    run = make()
    monkeypatch.setattr(run._orbax, "save_checkpointables_async", lambda *_, **__: None)
    with pytest.raises(
        errors.CheckpointError, match="step 4 was not saved: Orbax decl"
    ):
        run.save(4, state())


def test_a_complete_step_is_never_written_over(make, tmp_path):
    run = make()
    run.save(4, state())
    run.close()
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match="Step 4 already exists"):
        make().save(4, state(1.0))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"w": jax.ShapeDtypeStruct((8,), np.float32)},
            r"w: saved float32\[16\], now float32\[8\]",
        ),
        (
            {"w": jax.ShapeDtypeStruct((16,), np.int32)},
            r"w: saved float32\[16\], now int32\[16\]",
        ),
        (
            {"v": jax.ShapeDtypeStruct((16,), np.float32)},
            r"v: saved nothing, now float32\[16\]; w: saved float32\[16\], now nothing",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_leaf(make, wanted, message):
    run = make()
    run.save(2, state())
    run.close()
    with pytest.raises(errors.CheckpointError, match=message):
        make().restore(wanted)


def spoil_cut(path):
    path.write_bytes(path.read_bytes()[:20])


def spoil_text(path):
    path.write_text("nonsense")


def spoil_pipeline(path):
    content = json.loads(path.read_text())
    content["pipeline"]["data_shuffle_seed"] = 3
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"data_state\.json is missing; restore the file"),
        (spoil_cut, r"data_state\.json is cut short"),
        (spoil_text, r"data_state\.json is not JSON"),
        (spoil_pipeline, r"data_state\.json was altered"),
    ],
)
def test_a_spoilt_data_state_is_one_error_and_changes_nothing(
    make, tmp_path, spoil, message
):
    run = make()
    run.save(2, state())
    run.close()
    spoil(tmp_path / "2" / "data" / "data_state.json")
    before = files(tmp_path)
    run = make()
    with pytest.raises(errors.DataError, match=message):
        run.restore(abstract(state()))
    assert files(tmp_path) == before


def test_a_step_that_lost_a_part_is_named(make, tmp_path):
    run = make()
    run.save(2, state())
    run.close()
    for path in (tmp_path / "2" / "data").iterdir():
        path.unlink()
    (tmp_path / "2" / "data").rmdir()
    with pytest.raises(
        errors.CheckpointError, match=r"2 lacks \['data'\] of its parts"
    ):
        make().restore(abstract(state()))


def test_a_summary_tells_shapes_dtypes_shardings_and_bytes(make, tmp_path):
    run = make()
    run.save(2, state())
    run.close()
    parts = summary.read_parts(tmp_path / "2")
    assert summary.summarize(parts["state"]) == [
        summary.LeafSummary(
            path="w",
            shape=(16,),
            dtype="float32",
            sharding="[slice+fsdp] over slice=2, fsdp=4",
            num_bytes=64,
        )
    ]


def files(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_promised_directory_is_orbax_own(make, batches, tmp_path):
    # The state is inside the step's temporary directory before the step is committed.
    seen = []

    class Watching:
        async def save(self, directory):
            writing = await batches.save(directory)

            async def write():
                await writing
                path = await directory.await_creation()
                seen.append((path.parent.name, (path / "data_state.json").exists()))
                await asyncio.sleep(0)

            return write()

        async def load(self, directory):
            return await batches.load(directory)

    run = make(data=Watching())
    run.save(2, state())
    run.close()
    assert seen == [("2.orbax-checkpoint-tmp", True)]
    assert saved_steps(tmp_path) == [2]
