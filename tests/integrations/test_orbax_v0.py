"""Elastic data under Orbax v0's `CheckpointManager`, in one process."""

import errno

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import iterator
from tests import conftest, corpora


def state():
    return {"w": jnp.arange(4.0)}


def items(batches):
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state()), data=ec.orbax_v0.StatefulSave(batches)
    )


def wanted(batches):
    return ocp.args.Composite(
        state=ocp.args.StandardRestore(state()),
        data=ec.orbax_v0.StatefulRestore(batches),
    )


def manager(path, **options):
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


@pytest.fixture
def batches(tmp_path):
    """Makes iterators over the same data, on some devices."""
    path = tmp_path / "texts.array_record"
    corpora.write_texts(path, num_texts=200)
    data = conftest.data_of(str(path), length=8)

    def made(num_devices=4):
        mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
        return ec.batches(data, mesh=mesh, global_batch_size=8)

    return made


def check_next(left, right):
    assert next(left)["inputs"].tolist() == next(right)["inputs"].tolist()


@pytest.mark.parametrize("is_async", [True, False])
def test_the_data_continues_on_other_devices_under_the_manager(
    is_async, batches, tmp_path
):
    trained = batches()
    with manager(tmp_path / "run", enable_async_checkpointing=is_async) as saving:
        for step in (1, 2):
            next(trained)
            assert saving.save(step, args=items(trained))
    again = batches(num_devices=2)
    with manager(tmp_path / "run") as restoring:
        restored = restoring.restore(2, args=wanted(again))
    assert restored.state["w"].tolist() == [0, 1, 2, 3]
    check_next(restored.data, trained)


def test_our_checkpointer_and_the_manager_take_each_other_s_steps(batches, tmp_path):
    trained = batches()
    next(trained)
    with manager(tmp_path / "run") as saving:
        saving.save(1, args=items(trained))
    again = batches()
    with ec.Checkpointer([ec.Persistent(tmp_path / "run", every=1)]) as checkpointer:
        checkpointables = {"state": state(), "data": again}
        restored = checkpointer.load_checkpointables(1, checkpointables)
        assert restored["state"]["w"].tolist() == [0, 1, 2, 3]
        check_next(again, trained)
        checkpointer.save_checkpointables(2, checkpointables)
    again = batches()
    with manager(tmp_path / "run") as restoring:
        restoring.restore(2, args=wanted(again))
    check_next(again, trained)


def test_a_save_that_fails_leaves_the_step_before_and_the_next_one_succeeds(
    batches, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    trained = batches()
    with manager(tmp_path / "run") as saving:
        saving.save(1, args=items(trained))
        saving.wait_until_finished()
        with monkeypatch.context() as patched:
            patched.setattr(iterator.Batches, "save", fail)
            with pytest.raises(OSError, match="disk full"):
                saving.save(2, args=items(trained))
        saving.save(3, args=items(trained))
    with manager(tmp_path / "run") as looking:
        assert looking.all_steps() == [1, 3]


def test_a_damaged_data_state_is_an_error_that_names_its_file(batches, tmp_path):
    with manager(tmp_path / "run") as saving:
        saving.save(1, args=items(batches()))
    file = tmp_path / "run/1/data/data_state.json"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with (
        manager(tmp_path / "run") as restoring,
        pytest.raises(errors.ElasticCkptError, match=r"data_state\.json"),
    ):
        restoring.restore(1, args=wanted(batches()))


@pytest.mark.slow
def test_steps_that_a_file_commits_are_restored(batches, steps_in):
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    trained, again = batches(), batches()
    next(trained)
    with manager(steps_in("gs"), atomicity_options=mode) as saving:
        saving.save(1, args=items(trained))
        saving.wait_until_finished()
        saving.restore(1, args=wanted(again))
    check_next(again, trained)
