"""Our handlers under Orbax v0's `CheckpointManager`, in one process."""

import errno
import re
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1
from orbax.checkpoint._src.metadata import checkpoint as checkpoint_metadata

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import positional_data
from elastic_ckpt.integrations import orbax_v0_steps
from elastic_ckpt.tiers.persistent import ocdbt
from tests import corpora, runs
from tests.checkpoint import orbax_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def mesh_of(*shape):
    return jax.make_mesh(
        shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def abstract(tree, mesh):
    """The tree as it is wanted, its arrays of two dims on another mesh."""

    def on_mesh(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = PartitionSpec("b", "a") if leaf.ndim == 2 else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(on_mesh, tree)


def bits(tree):
    """The dtypes or types of all leaves, and their bits."""
    return [
        (str(getattr(leaf, "dtype", type(leaf))), orbax_steps.data(leaf).tobytes())
        for leaf in jax.tree.leaves(tree)
    ]


def state():
    return orbax_steps.state(mesh_of(4, 2)) | {"name": "a text"}


def composite(**items):
    return ocp.args.Composite(**items)


def manager(path, **options):
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


def save(path, *steps, **items):
    with manager(path) as saving:
        for step in steps:
            assert saving.save(step, args=composite(**items))


def restore(path, **items):
    with manager(path) as restoring:
        return restoring.restore(restoring.latest_step(), args=composite(**items))


def batches_of(directory, size=8):
    path = directory / "texts.array_record"
    if not path.exists():
        corpora.write_texts(path, num_texts=200)
    data = positional_data.PositionalData(files=(str(path),), max_target_length=8)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    return ec.batches(data, mesh=mesh, global_batch_size=size)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tree_comes_back_with_its_bits_on_another_mesh(asynchronous, tmp_path):
    with manager(tmp_path, enable_async_checkpointing=asynchronous) as saving:
        assert saving.save(3, args=composite(state=ec.orbax_v0.TreeSave(state())))
        saving.wait_until_finished()
        wanted = abstract(state(), mesh_of(2, 4))
        restored = saving.restore(
            3, args=composite(state=ec.orbax_v0.TreeRestore(wanted))
        ).state
        # Without arguments it is restored as it was saved.
        as_saved = saving.restore(3).state
    assert bits(restored) == bits(as_saved) == bits(state())
    assert restored["params"]["w"].sharding == wanted["params"]["w"].sharding
    assert as_saved["params"]["w"].sharding == state()["params"]["w"].sharding
    assert jax.tree.structure(restored) == jax.tree.structure(state())
    # A part on request, and stock Orbax reads it by either version.
    part = ec.orbax_v0.TreeRestore({"step": 0}, partial_restore=True)
    assert restore(tmp_path, state=part).state == {"step": 12}
    of_v0 = restore(tmp_path, state=ocp.args.PyTreeRestore(item=wanted)).state
    of_v1 = v1.load_checkpointables(tmp_path / "3", {"state": wanted})["state"]
    assert bits(of_v0) == bits(of_v1) == bits(state())


def test_our_checkpointer_restores_and_verifies_steps_of_the_manager(tmp_path):
    path = tmp_path / "run"
    batches = batches_of(tmp_path)
    next(batches)
    items = {
        "opt": ec.orbax_v0.TreeSave({"mu": state()["params"]["w"]}),
        "state": ec.orbax_v0.TreeSave(state()),
        "data": ec.orbax_v0.StatefulSave(batches),
        "plain": ocp.args.JsonSave({"by": "Orbax"}),
    }
    save(path, 1, 2, **items)
    expected = next(batches)
    again = batches_of(tmp_path)
    with ec.Checkpointer([ec.Persistent(path, every=1)]) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [1, 2]
        wanted = {"state": abstract(state(), mesh_of(2, 4)), "opt": None, "data": again}
        restored = checkpointer.load_checkpointables(None, wanted)
    assert bits(restored["state"]) == bits(state())
    assert bits(restored["opt"]) == bits(state()["params"]["w"])
    assert restored["opt"]["mu"].sharding == state()["params"]["w"].sharding
    assert bits(next(again)) == bits(expected)
    report = runs.verb("verify", path)
    assert "PASSED" in report, report


def test_the_manager_restores_steps_of_our_checkpointer(tmp_path):
    path = tmp_path / "run"
    batches = batches_of(tmp_path)
    with ec.Checkpointer([ec.Persistent(path, every=1)]) as checkpointer:
        checkpointer.save_checkpointables(4, {"state": state(), "data": batches})
    expected = next(batches)
    restored = restore(
        path,
        state=ec.orbax_v0.TreeRestore(abstract(state(), mesh_of(2, 4))),
        data=ec.orbax_v0.StatefulRestore(batches),
    )
    assert bits(restored.state) == bits(state())
    assert bits(next(restored.data)) == bits(expected)


@pytest.mark.parametrize("save_args", [ocp.args.StandardSave, ocp.args.PyTreeSave])
def test_items_that_plain_orbax_saved_are_restored(save_args, tmp_path, caplog):
    tree = {"params": state()["params"]}
    save(tmp_path, 1, state=save_args(tree))
    wanted = ec.orbax_v0.TreeRestore(abstract(tree, mesh_of(2, 4)))
    assert bits(restore(tmp_path, state=wanted).state) == bits(tree)
    assert "cannot be verified" in caplog.text


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_an_error_that_names_the_value_or_the_file(tmp_path):
    array = np.arange(2**16, dtype="float64")
    batches = batches_of(tmp_path)
    items = {
        "state": ec.orbax_v0.TreeSave({"w": array}),
        "data": ec.orbax_v0.StatefulSave(batches),
    }
    save(tmp_path / "run", 1, 2, **items)
    stores = (tmp_path / "run" / "2").glob("state/ocdbt.process_*/d/*")
    flip(max(stores, key=lambda each: each.stat().st_size), 5000)
    with manager(tmp_path / "run") as restoring:
        args = composite(state=ec.orbax_v0.TreeRestore())
        with pytest.raises(errors.CheckpointError, match="no good copy of state/w"):
            restoring.restore(2, args=args)
        assert bits(restoring.restore(1, args=args).state) == bits({"w": array})
    for name in ("data_state.json", "manifest-"):
        file = next((tmp_path / "run" / "2").rglob(f"{name}*"))
        flip(file, file.stat().st_size // 2)
        with pytest.raises(errors.ElasticCkptError, match=re.escape(file.name)):
            restore(tmp_path / "run", data=ec.orbax_v0.StatefulRestore(batches))
        flip(file, file.stat().st_size // 2)


def test_a_save_that_fails_leaves_the_step_before_and_the_next_one_succeeds(
    tmp_path, monkeypatch
):
    def fail(*args):
        del args
        raise OSError(errno.ENOSPC, "disk full")

    args = composite(state=ec.orbax_v0.TreeSave(state()))
    with manager(tmp_path) as saving:
        saving.save(1, args=args)
        saving.wait_until_finished()
        with monkeypatch.context() as patched:
            patched.setattr(ocdbt, "write", fail)
            saving.save(2, args=args)
            with pytest.raises(errors.CheckpointError, match="disk full"):
                saving.wait_until_finished()
        unsavable = ec.orbax_v0.TreeSave({"w": {"x": object()}})
        with pytest.raises(errors.CheckpointError, match="state/w/x"):
            saving.save(2, args=composite(state=unsavable))
        with manager(tmp_path) as looking:
            assert looking.all_steps() == [1]
        saving.save(3, args=args)
    with manager(tmp_path) as looking:
        assert looking.all_steps() == [1, 3]
    restored = restore(tmp_path, state=ec.orbax_v0.TreeRestore()).state
    assert bits(restored) == bits(state())
    for other in ({"step": np.zeros(5)}, {"v": np.zeros(4)}):
        with pytest.raises(errors.CheckpointError, match="another model"):
            restore(tmp_path, state=ec.orbax_v0.TreeRestore(other))


def test_a_checkpoint_that_is_no_item_is_refused_with_the_way_to_save_it(tmp_path):
    with (
        ocp.Checkpointer(ec.orbax_v0.TreeHandler()) as saving,
        pytest.raises(errors.CheckpointError, match=r"ocp.args.Composite\(state"),
    ):
        saving.save(tmp_path / "one", args=ec.orbax_v0.TreeSave({"n": 1}))
    assert not (tmp_path / "one").exists()


@pytest.fixture
def late_metadata(monkeypatch):
    """Has Orbax write a checkpoint's metadata once ours has looked for it."""
    looked = threading.Event()
    is_item = orbax_v0_steps.is_item
    write = checkpoint_metadata._MetadataStoreImpl.write

    def looking(*arguments, **options):
        looked.set()
        return is_item(*arguments, **options)

    def late(*arguments):
        assert looked.wait(60)
        write(*arguments)

    monkeypatch.setattr(orbax_v0_steps, "is_item", looking)
    monkeypatch.setattr(checkpoint_metadata._MetadataStoreImpl, "write", late)


@pytest.mark.usefixtures("late_metadata")
def test_an_item_is_saved_however_late_orbax_writes_its_metadata(tmp_path):
    with manager(tmp_path) as saving:
        saving.save(1, args=composite(state=ec.orbax_v0.TreeSave({"n": 12})))
        saving.wait_until_finished()
    restored = restore(tmp_path, state=ec.orbax_v0.TreeRestore())
    assert restored.state == {"n": 12}


@pytest.mark.parametrize(
    "place",
    ["local", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gs", "s3"))],
)
def test_steps_that_a_file_commits_are_restored_and_verified(place, steps_in):
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    args = composite(state=ec.orbax_v0.TreeSave(state()))
    path = steps_in(place)
    with manager(path, atomicity_options=mode, max_to_keep=1) as saving:
        saving.save(1, args=args)
        saving.save(2, args=args)
        saving.wait_until_finished()
        wanted = composite(state=ec.orbax_v0.TreeRestore())
        assert bits(saving.restore(2, args=wanted).state) == bits(state())
    assert "PASSED" in runs.verb("verify", path)
