"""Our handlers under Orbax v0's `CheckpointManager`, in one process."""

import errno
import pathlib
import random
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
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


def batches_of(corpus, size=8):
    data = positional_data.PositionalData(files=(corpus,), max_target_length=8)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    return ec.batches(data, mesh=mesh, global_batch_size=size)


@pytest.fixture
def corpus(tmp_path):
    return corpora.write_texts(tmp_path / "texts.array_record", num_texts=200)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tree_comes_back_with_its_bits_on_another_mesh(asynchronous, tmp_path):
    with manager(tmp_path, enable_async_checkpointing=asynchronous) as saving:
        assert saving.save(3, args=composite(state=ec.orbax_v0.TreeSave(state())))
        saving.wait_until_finished()
        wanted = abstract(state(), mesh_of(2, 4))
        restored = saving.restore(
            3, args=composite(state=ec.orbax_v0.TreeRestore(wanted))
        ).state
    assert bits(restored) == bits(state())
    assert restored["params"]["w"].sharding == wanted["params"]["w"].sharding
    assert jax.tree.structure(restored) == jax.tree.structure(state())


def test_arrays_may_be_donated_once_save_returned(tmp_path):
    array = jax.numpy.arange(2**20, dtype="float32")
    with manager(tmp_path) as saving:
        saving.save(1, args=composite(state=ec.orbax_v0.TreeSave({"w": array})))
        array = jax.jit(lambda w: w * 0, donate_argnums=0)(array)
        array.block_until_ready()
    restored = restore(tmp_path, state=ec.orbax_v0.TreeRestore()).state
    assert bits(restored) == bits({"w": np.arange(2**20, dtype="float32")})


def test_no_arguments_restore_the_tree_as_it_was_saved(tmp_path):
    save(tmp_path, 1, state=ec.orbax_v0.TreeSave(state()))
    with manager(tmp_path) as restoring:
        restored = restoring.restore(1).state
    assert bits(restored) == bits(state())
    assert restored["params"]["w"].sharding == state()["params"]["w"].sharding


def test_stock_orbax_reads_it_by_either_version(tmp_path):
    save(tmp_path, 1, state=ec.orbax_v0.TreeSave(state()))
    wanted = abstract(state(), mesh_of(2, 4))
    of_v0 = restore(tmp_path, state=ocp.args.PyTreeRestore(item=wanted)).state
    of_v1 = v1.load_checkpointables(tmp_path / "1", {"state": wanted})["state"]
    assert bits(of_v0) == bits(of_v1) == bits(state())


def test_the_checkpointer_restores_and_verifies_its_steps(corpus, tmp_path):
    path = tmp_path / "run"
    batches = batches_of(corpus)
    next(batches)
    items = {
        "opt": ec.orbax_v0.TreeSave({"mu": state()["params"]["w"]}),
        "state": ec.orbax_v0.TreeSave(state()),
        "data": ec.orbax_v0.StatefulSave(batches),
        "plain": ocp.args.JsonSave({"by": "Orbax"}),
    }
    save(path, 1, 2, **items)
    expected = next(batches)
    again = batches_of(corpus)
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


def test_steps_of_the_checkpointer_are_restored(corpus, tmp_path):
    path = tmp_path / "run"
    batches = batches_of(corpus)
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
    opt = ec.orbax_v0.TreeSave({"mu": tree["params"]["w"]})
    save(tmp_path, 1, state=save_args(tree))
    save(tmp_path, 2, state=save_args(tree), opt=opt)
    wanted = ec.orbax_v0.TreeRestore(abstract(tree, mesh_of(2, 4)))
    with manager(tmp_path) as restoring:
        for step in (1, 2):
            caplog.clear()
            restored = restoring.restore(step, args=composite(state=wanted)).state
            assert bits(restored) == bits(tree)
            assert "cannot be verified" in caplog.text


def test_the_batches_continue_with_another_size(corpus, tmp_path):
    batches = batches_of(corpus, size=8)
    for _ in range(3):
        next(batches)
    with manager(tmp_path) as saving:
        saving.save(3, args=composite(data=ec.orbax_v0.StatefulSave(batches)))
        # The state is that of the call, whatever is read meanwhile.
        expected = [next(batches) for _ in range(2)]
    again = batches_of(corpus, size=16)
    restore(tmp_path, data=ec.orbax_v0.StatefulRestore(again))
    rows = [np.concatenate([np.asarray(b["inputs"]) for b in expected])]
    assert bits(rows) == bits([np.asarray(next(again)["inputs"])])


def test_the_manager_keeps_max_to_keep_steps(tmp_path):
    with manager(tmp_path, max_to_keep=2, save_interval_steps=2) as saving:
        for step in range(8):
            args = composite(state=ec.orbax_v0.TreeSave({"n": step}))
            assert saving.save(step, args=args) == (step % 2 == 0)
    with manager(tmp_path) as looking:
        assert looking.all_steps() == [4, 6]


def flip(path, seed):
    """Flips one bit of the values of a step."""
    stores = sorted(pathlib.Path(path).glob("state/ocdbt.process_*/d/*"))
    file = max(stores, key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    generator = random.Random(seed)
    content[generator.randrange(1000, 2**20)] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_of_a_value_is_an_error_that_names_it(seed, tmp_path):
    array = np.random.default_rng(seed).random((512, 512))
    save(tmp_path, 1, 2, state=ec.orbax_v0.TreeSave({"w": array}))
    flip(tmp_path / "2", seed)
    with manager(tmp_path) as restoring:
        args = composite(state=ec.orbax_v0.TreeRestore())
        with pytest.raises(errors.CheckpointError, match="no good copy of state/w"):
            restoring.restore(2, args=args)
        assert bits(restoring.restore(1, args=args).state) == bits({"w": array})


@pytest.mark.parametrize("name", ["data_state.json", "manifest-"])
def test_a_damaged_file_of_the_data_or_a_manifest_is_an_error(name, corpus, tmp_path):
    path = tmp_path / "run"
    batches = batches_of(corpus)
    save(path, 1, data=ec.orbax_v0.StatefulSave(batches))
    (file,) = [each for each in path.rglob("*.json") if each.name.startswith(name)]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(errors.ElasticCkptError, match=file.name.replace(".", r"\.")):
        restore(path, data=ec.orbax_v0.StatefulRestore(batches))


def test_a_save_that_fails_leaves_the_step_before_and_the_next_one_succeeds(
    tmp_path, monkeypatch
):
    def fail(*args):
        del args
        raise OSError(errno.ENOSPC, "disk full")

    with manager(tmp_path) as saving:
        args = composite(state=ec.orbax_v0.TreeSave(state()))
        saving.save(1, args=args)
        saving.wait_until_finished()
        with monkeypatch.context() as patched:
            patched.setattr(ocdbt, "write", fail)
            saving.save(2, args=args)
            with pytest.raises(errors.CheckpointError, match="disk full"):
                saving.wait_until_finished()
        with manager(tmp_path) as looking:
            assert looking.all_steps() == [1]
        saving.save(3, args=args)
    with manager(tmp_path) as looking:
        assert looking.all_steps() == [1, 3]
    restored = restore(tmp_path, state=ec.orbax_v0.TreeRestore()).state
    assert bits(restored) == bits(state())


def test_a_leaf_that_cannot_be_saved_is_named_by_save_itself(tmp_path):
    with manager(tmp_path) as saving:
        args = composite(state=ec.orbax_v0.TreeSave({"w": {"x": object()}}))
        with pytest.raises(errors.CheckpointError, match="state/w/x"):
            saving.save(1, args=args)
        saving.save(2, args=composite(state=ec.orbax_v0.TreeSave(state())))
    assert bits(restore(tmp_path, state=ec.orbax_v0.TreeRestore()).state) == bits(
        state()
    )


def test_another_model_is_refused_with_the_leaf_that_differs(tmp_path):
    save(tmp_path, 1, state=ec.orbax_v0.TreeSave({"w": np.zeros(4)}))
    for other in ({"w": np.zeros(5)}, {"v": np.zeros(4)}):
        with pytest.raises(errors.CheckpointError, match=r"another model.*state/[wv]"):
            restore(tmp_path, state=ec.orbax_v0.TreeRestore(other))


def test_a_part_of_a_tree_is_restored_on_request(tmp_path):
    save(tmp_path, 1, state=ec.orbax_v0.TreeSave(state()))
    part = ec.orbax_v0.TreeRestore({"step": 0}, partial_restore=True)
    assert restore(tmp_path, state=part).state == {"step": 12}


@pytest.fixture
def late_metadata(monkeypatch):
    """Has Orbax write the metadata of checkpoints half a second late."""
    write = checkpoint_metadata._MetadataStoreImpl.write

    def late(*arguments):
        time.sleep(0.5)
        write(*arguments)

    monkeypatch.setattr(checkpoint_metadata._MetadataStoreImpl, "write", late)


@pytest.mark.parametrize("checkpointer", [ocp.AsyncCheckpointer, ocp.Checkpointer])
@pytest.mark.usefixtures("late_metadata")
def test_a_checkpoint_that_is_no_item_is_refused_with_the_way_to_save_it(
    checkpointer, tmp_path
):
    def save_it():
        with checkpointer(ec.orbax_v0.TreeHandler()) as saving:
            saving.save(tmp_path / "one", args=ec.orbax_v0.TreeSave({"n": 1}))
            if checkpointer is ocp.AsyncCheckpointer:
                saving.wait_until_finished()

    with pytest.raises(errors.CheckpointError, match=r"ocp.args.Composite\(state"):
        save_it()
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("mode", ocp.options.AtomicityMode)
@pytest.mark.usefixtures("late_metadata")
def test_an_item_is_saved_however_late_orbax_writes_its_metadata(mode, tmp_path):
    atomicity = ocp.options.AtomicityOptions(mode=mode)
    with manager(tmp_path, atomicity_options=atomicity) as saving:
        saving.save(1, args=composite(state=ec.orbax_v0.TreeSave({"n": 12})))
        saving.wait_until_finished()
        restored = saving.restore(1, args=composite(state=ec.orbax_v0.TreeRestore()))
    assert restored.state == {"n": 12}


def test_storage_that_takes_no_metadata_is_an_error_that_names_it(tmp_path):
    with pytest.raises(errors.CheckpointError, match="has not written _CHECKPOINT_MET"):
        orbax_v0_steps.is_item(epath.Path(tmp_path / "1" / "state"), timeout_secs=0.05)


def test_a_step_that_a_file_commits_is_complete_too(corpus, tmp_path):
    path, batches = tmp_path / "run", batches_of(corpus)
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    items = composite(
        state=ec.orbax_v0.TreeSave(state()), data=ec.orbax_v0.StatefulSave(batches)
    )
    with manager(path, atomicity_options=mode) as saving:
        saving.save(1, args=items)
        expected = next(batches)
        saving.wait_until_finished()
        wanted = composite(
            state=ec.orbax_v0.TreeRestore(),
            data=ec.orbax_v0.StatefulRestore(batches),
        )
        restored = saving.restore(1, args=wanted)
    assert bits(restored.state) == bits(state())
    assert bits(next(batches)) == bits(expected)


@pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)
def test_steps_in_a_bucket_are_saved_restored_and_verified(bucket):
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    args = composite(state=ec.orbax_v0.TreeSave(state()))
    with manager(bucket, atomicity_options=mode, max_to_keep=1) as saving:
        saving.save(1, args=args)
        saving.save(2, args=args)
        saving.wait_until_finished()
        wanted = composite(state=ec.orbax_v0.TreeRestore())
        assert bits(saving.restore(2, args=wanted).state) == bits(state())
    assert "PASSED" in runs.verb("verify", bucket)
