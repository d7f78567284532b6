"""A checkpointer over tiers, on one host: its verbs, its stages, what it restores."""

import os
import pathlib
import stat
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Peers, Persistent
from elastic_ckpt.tiers.persistent import persistent_root
from tests import seams, shared_memory
from tests.checkpoint.test_component_io import Counter
from tests.recorded_events import RecordedEvents

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

SPEC = PartitionSpec("a", "b")


def state(step, spec=SPEC):
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    over = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), spec)
    return {
        "params": {
            "w": jax.device_put(values, over),
            "b": jnp.full(5, step, jnp.bfloat16),
        },
        "key": jax.random.key(step),
        "n": step,
    }


def abstract(tree):
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def bits(tree):
    def bits_of(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return jax.tree.map(bits_of, tree)


def save(checkpointer, step, **options):
    parts = {"state": state(step), "data": Counter(10 * step)}
    return checkpointer.save_checkpointables(step, parts, **options)


def check(checkpointer, step, asked=None):
    """A step, the newest one unless another is asked for, is as it was saved."""
    counter = Counter()
    restored = checkpointer.load_checkpointables(
        asked, {"state": abstract(state(0)), "data": counter}
    )
    assert bits(restored["state"]) == bits(state(step))
    assert counter.count == 10 * step


def stored(tmp_path):
    return persistent_root.PersistentRoot.from_path(tmp_path / "steps").steps()


def test_a_step_comes_back_bit_equal_under_another_sharding(make):
    saved = make(every=None)
    assert saved.latest is None
    assert save(saved, 3)
    assert saved.latest.step == 3
    saved.close()
    other = state(0, PartitionSpec(None, ("b", "a")))
    counter, recorded = Counter(), RecordedEvents()
    restored = make(every=None, emit=recorded).load_checkpointables(
        None, {"state": abstract(other), "data": counter}
    )
    assert bits(restored["state"]) == bits(state(3))
    assert restored["state"]["params"]["w"].sharding.is_equivalent_to(
        other["params"]["w"].sharding, 2
    )
    assert restored["data"] is counter
    assert counter.count == 30
    (event,) = recorded.named("restored_from")
    assert event["local_bytes"] > 0
    assert event["persistent_bytes"] == event["bad_copies"] == 0


def test_ram_keeps_the_newest_step_and_storage_what_is_due(make, tmp_path):
    recorded = RecordedEvents()
    checkpointer = make(every=2, emit=recorded)
    for step in range(1, 6):
        assert save(checkpointer, step)
        checkpointer.wait()
    assert [each.step for each in checkpointer.checkpoints] == [2, 4, 5]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 4]
    names = os.listdir(tmp_path / "ram" / "hosts" / "0")
    assert [name.partition("-")[0] for name in names if name[0].isdigit()] == ["5"]
    # A step that is there is not due; one before the newest will never be saved.
    assert not checkpointer.should_save(2)
    with pytest.raises(errors.CheckpointError, match="has step 5, which is later"):
        checkpointer.should_save(1)


@pytest.mark.parametrize("kinds", ["ram", "steps", "ram steps"])
def test_a_run_that_begins_anew_among_later_steps_is_refused_at_once(tmp_path, kinds):
    every = {"ram": Local, "steps": Persistent}
    tiers = [every[kind](tmp_path / kind, every=10) for kind in kinds.split()]
    newest = tmp_path / kinds.split()[-1]

    def opened():
        return frontend.Checkpointer(tiers, run="run")

    with opened() as checkpointer:
        for step in (10, 20):
            assert checkpointer.save(step, {"n": step})
    with opened() as checkpointer:
        refused = pytest.raises(
            errors.CheckpointError,
            match=rf"step 1 cannot be saved: {newest} has step 20.*go_back=True.*anoth",
        )
        for call in (
            lambda: checkpointer.should_save(1),
            lambda: checkpointer.save(1, {"n": 1}),
            lambda: checkpointer.save(1, {"n": 1}, force=True),
            lambda: checkpointer.save_async(1, {"n": 1}),
            lambda: checkpointer.save_checkpointables(1, {"state": {"n": 1}}),
        ):
            with refused:
                call()
        assert checkpointer.load() == {"n": 20}
        assert not checkpointer.should_save(21)
        assert checkpointer.save(30, {"n": 30})
    with opened() as checkpointer:
        assert [each.step for each in checkpointer.checkpoints][-1] == 30
        if kinds == "steps":
            assert checkpointer.load(10, go_back=True) == {"n": 10}
            assert checkpointer.save(11, {"n": 11}, force=True)
            assert checkpointer.latest.step == 11


@jax.tree_util.register_pytree_node_class
class Node:
    """A node of a user's library whose data are arrays."""

    def __init__(self, w, table):
        self.w, self.table = w, table

    def tree_flatten(self):
        return (self.w,), self.table

    @classmethod
    def tree_unflatten(cls, table, children):
        return cls(*children, table)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: Node(np.full(2, n), np.arange(3)),
        lambda n: {(1, 2) if n == 1 else np.int64(3): np.full(2, n)},
        lambda n: {1 if n == 1 else True: np.full(2, n)},
        lambda n: [np.full(2, n)] if n == 1 else (np.full(2, n), {}, []),
    ],
    ids=["array as data", "keys that are not compared", "equal keys", "empty nodes"],
)
def test_trees_that_cannot_be_compared_are_saved_as_stock_orbax_does(
    make, tmp_path, made
):
    checkpointer = make(local=KEPT)
    with ocp.training.Checkpointer(tmp_path / "stock") as stock:
        for step in (1, 2, 3):
            for each in (stock, checkpointer):
                assert each.save(step, made(step), force=True)
            checkpointer.wait()
        for step in (1, 2, 3):
            expected = jax.tree.leaves(stock.load(step, made(step)))
            for found in (
                checkpointer.load(step, made(step)),
                ocp.load(tmp_path / "steps" / str(step), made(step)),
            ):
                np.testing.assert_array_equal(jax.tree.leaves(found), expected)


class LateClock(seams.Clock):
    """A clock that is late for the time since the epoch."""

    def __init__(self, late_ns):
        self._late_ns = late_ns

    def time_ns(self):
        return super().time_ns() + self._late_ns


def test_minutes_go_on_from_the_backup_of_the_world_before(tmp_path):
    # Worlds may be shorter than the time between two backups.
    tiers = [Local(tmp_path / "ram", every=1)]
    tiers.append(Persistent(tmp_path / "steps", every_minutes=60))
    for step, minutes in ((1, 0), (2, 30), (3, 61)):
        late = LateClock(minutes * 60 * 10**9)
        with seams.by(late), frontend.Checkpointer(tiers, run="run") as world:
            world.save(step, {"n": step}, force=step == 1)
        assert stored(tmp_path) == ([1, 3] if step == 3 else [1])


def test_a_step_that_orbax_alone_saved_is_found_and_told_as_unverified(make, tmp_path):
    recorded = RecordedEvents()
    checkpointer = make(emit=recorded)
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        stock.save_checkpointables(9, {"state": {"w": jnp.arange(4.0)}})
    # Somebody else's step is found by looking again.
    assert checkpointer.latest is None
    checkpointer.reload()
    assert checkpointer.latest.step == 9
    restored = checkpointer.load(None, {"w": jnp.zeros(4)})
    assert bits(restored) == bits({"w": jnp.arange(4.0)})
    (event,) = recorded.named("degraded")
    assert event["why"] == "plain Orbax saved it, and its values cannot be verified"


def test_what_a_step_holds_is_told_and_can_be_asked_for(make):
    checkpointer = make(every=None)
    tree = {"layers": [jnp.arange(6.0).reshape(2, 3), jnp.ones((), jnp.bfloat16)]}
    parts = {"state": tree, "ema": jnp.arange(4), "data": Counter(1)}
    checkpointer.save_checkpointables(4, parts)
    held = checkpointer.checkpointables_metadata()
    assert (held.step, held.save) == (4, checkpointer.latest.save)
    assert held.metadata["data"] is None
    assert held.metadata["ema"] == jax.ShapeDtypeStruct((4,), np.int32)
    of_state = checkpointer.metadata(checkpointer.latest).metadata
    assert of_state["layers"][0] == jax.ShapeDtypeStruct((2, 3), np.float32)
    assert of_state["layers"][1].dtype == jnp.bfloat16
    assert bits(checkpointer.load(checkpointer.latest, of_state)) == bits(tree)
    restored = checkpointer.load_checkpointables()
    assert bits(restored) == bits({"state": tree, "ema": jnp.arange(4)})
    with pytest.raises(errors.CheckpointError, match="no 'opt'; it has"):
        checkpointer.metadata(checkpointable_name="opt")


def test_restored_values_stay_when_the_files_of_their_step_are_used_again(
    make, tmp_path
):
    checkpointer = make(every=None)

    def files():
        found = tmp_path.glob("ram/hosts/*/**/*")
        return {each.stat().st_ino for each in found if each.stat().st_size > 2**18}

    def saved(step):
        return {"jax": jnp.full(2**18, step), "numpy": np.full(2**18, step)}

    assert checkpointer.save(1, saved(1))
    of_first = files()
    restored = checkpointer.load(1, saved(0))
    for step in range(2, 5):
        assert checkpointer.save(step, saved(step))
        checkpointer.wait()
    assert of_first & files()
    jax.tree.map(np.testing.assert_array_equal, restored, saved(1))


def test_files_of_the_next_step_are_made_ahead(make, tmp_path):
    def inode(place):
        deadline = time.monotonic() + 600
        while not (found := [*tmp_path.glob(f"ram/hosts/0/{place}")]):
            assert time.monotonic() < deadline, place
            time.sleep(0.01)
        (path,) = found
        return path.stat().st_ino

    def save(checkpointer, step):
        assert checkpointer.save(step, {"w": jnp.full(2**18, step)})
        checkpointer.wait()
        return inode(f"{step}-*/*/w/c/*")

    with make(every=None) as first:
        save(first, 1)
        assert inode("spare/*") == save(first, 2)
    with make(every=None) as second:
        assert not [*tmp_path.glob("ram/hosts/0/spare/*")]
        second.load(2, {"w": jnp.zeros(2**18)})
        assert inode("spare/*") == save(second, 3)


def test_a_load_is_under_the_contexts_of_jax_of_its_caller(make):
    checkpointer = make(every=None)
    assert checkpointer.save(1, {"n": np.arange(3.0)})
    with jax.enable_x64(True):
        restored = checkpointer.load(1, {"n": jax.Array})
    assert restored["n"].dtype == np.float64


def test_what_is_in_ram_is_its_owners_alone():
    with shared_memory.directory("private") as directory:
        root = pathlib.Path(directory, "ram")
        # As a volume may be given.
        root.mkdir(mode=0o755)
        before = os.umask(0)
        try:
            with frontend.Checkpointer([Local(root), Peers()], run="run") as opened:
                assert save(opened, 1)
                check(opened, 1)
        finally:
            os.umask(before)
        for path, mode in ((root, 0o700), (root / "secret", 0o600)):
            assert stat.S_IMODE(path.stat().st_mode) == mode


INTEGERS = (int, np.int64, np.int32, np.uint8, np.array, jnp.int32, jnp.array)
STATE = {"w": np.ones(2)}


def test_an_integer_of_any_type_is_a_step(make):
    checkpointer = make()
    for number, kind in enumerate(INTEGERS, start=3):
        step = kind(number)
        assert checkpointer.should_save(step)
        assert checkpointer.save(step, STATE)
        checkpointer.record_metrics(step, {"loss": 1.5})
        checkpointer.wait()
        assert type(checkpointer.latest.step) is int
        assert [each.step for each in checkpointer.checkpoints] == [number]
        assert checkpointer.evaluations() == {number: {"loss": 1.5}}
        assert checkpointer.is_durable(step)
        assert checkpointer.load(step, STATE).keys() == STATE.keys()
        assert checkpointer.load_async(step, STATE).result().keys() == STATE.keys()
        assert checkpointer.metadata(step).step == number
        assert checkpointer.delete(step)
        checkpointer.save(step, STATE)
        checkpointer.cancel(step)
        assert checkpointer.latest is None


def test_a_step_that_is_leased_is_not_deleted_from_any_tier(make, tmp_path):
    checkpointer = make()
    for step in (1, 2):
        assert checkpointer.save(step, STATE, force=True)
    checkpointer.wait()
    with ec.lease(tmp_path / "steps" / "2"):
        with pytest.raises(errors.CheckpointError, match=r"step 2 in .* is leased"):
            checkpointer.delete(2)
        assert checkpointer.latest.step == 2
        assert checkpointer.load(2, STATE).keys() == STATE.keys()
    assert checkpointer.delete(2)
    assert checkpointer.latest.step == 1
    assert not (tmp_path / "steps" / "2").exists()


def test_what_is_no_step_is_refused_by_name(make):
    checkpointer = make()
    calls = (
        checkpointer.should_save,
        lambda step: checkpointer.save(step, STATE),
        lambda step: checkpointer.save_checkpointables_async(step, {"state": STATE}),
        lambda step: checkpointer.record_metrics(step, {"loss": 1.5}),
        checkpointer.load,
        checkpointer.load_async,
        checkpointer.load_checkpointables,
        checkpointer.metadata,
        checkpointer.is_durable,
        checkpointer.delete,
        checkpointer.cancel,
    )
    refused = {
        "-1": -1,
        r"np.int64\(-1\)": np.int64(-1),
        "1.0": 1.0,
        "True": True,
        "np.True_": np.True_,
        "'3'": "3",
        r"array\(\[3\]\)": np.array([3]),
        r"Array\(3., dtype=float32": jnp.float32(3),
    }
    for name, step in refused.items():
        for call in calls:
            message = f"^{name}.* is not a step; give"
            with pytest.raises(errors.CheckpointError, match=message):
                call(step)
    assert checkpointer.save(1, STATE)


KEPT = {"keep": ocp.training.preservation_policies.PreserveAll()}
METRICS = {"loss": 0.5, "nested": {"a": [1, 2]}}
CUSTOM = {"note": "x", "numbers": [1, 2.5, None]}


def noted(checkpoint):
    return checkpoint.step, checkpoint.metrics, checkpoint.custom_metadata


def test_a_step_has_its_metrics_and_metadata_wherever_it_is_found(make, tmp_path):
    checkpointer = make(every=2, local=KEPT)
    checkpointer.save(1, {"w": jnp.ones(2)})
    checkpointer.save(2, {"w": jnp.ones(2)}, metrics=METRICS, custom_metadata=CUSTOM)
    expected = [(1, None, None), (2, METRICS, CUSTOM)]
    assert noted(checkpointer.latest) == expected[1]
    assert list(map(noted, checkpointer.checkpoints)) == expected
    assert noted(checkpointer.metadata()) == expected[1]
    assert noted(checkpointer.checkpointables_metadata(1)) == expected[0]
    checkpointer.close()
    from_ram, from_storage = make(local=KEPT), make(ram="other ram")
    assert noted(from_ram.latest) == noted(from_storage.latest) == expected[1]
    assert list(map(noted, from_ram.checkpoints)) == expected
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert stock.latest.metrics == METRICS
        ours, theirs = from_storage.metadata(2), stock.metadata(2)
        assert noted(theirs) == noted(ours)
        seconds = theirs.commit_timestamp_nsecs - ours.commit_timestamp_nsecs
        assert 0 <= seconds < 600e9


def test_steps_that_orbax_alone_saved_are_listed_with_what_they_have(make, tmp_path):
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        for step in (3, 7):
            stock.save(
                step, {"n": step}, metrics={"loss": step}, custom_metadata=CUSTOM
            )
        expected = [(3, {"loss": 3}, CUSTOM), (7, {"loss": 7}, CUSTOM)]
        committed = [
            each.commit_timestamp_nsecs for each in map(stock.metadata, (3, 7))
        ]
    checkpointer = make(local=KEPT)
    assert list(map(noted, checkpointer.checkpoints)) == expected
    times = [each.commit_timestamp_nsecs for each in checkpointer.checkpoints]
    assert times == committed
    assert noted(checkpointer.latest) == noted(checkpointer.metadata()) == expected[1]
    assert checkpointer.save(8, {"n": 8})
    checkpointer.wait()
    assert [each.step for each in checkpointer.checkpoints] == [3, 7, 8]
    assert checkpointer.load(3) == {"n": 3}


def test_a_step_that_exists_is_saved_only_to_overwrite_it(make, tmp_path):
    checkpointer = make(local=KEPT)
    with ocp.training.Checkpointer(tmp_path / "stock") as stock:
        for each in (stock, checkpointer):
            for step in (2, 4):
                assert each.save(step, {"n": step})
            for step, force in [(2, False), (4, False), (4, True)]:
                with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
                    each.save(step, {"n": 0}, force=force)
            assert each.load(4) == {"n": 4}
        assert not stock.save(3, {"n": 3})
    with pytest.raises(errors.CheckpointError, match="has step 4, which is later"):
        checkpointer.save(3, {"n": 3})
    with pytest.raises(errors.CheckpointError, match="step 2 already exists"):
        checkpointer.save_checkpointables(2, {"state": {"n": 0}})
    assert checkpointer.save(4, {"n": 5}, overwrite=True)
    assert checkpointer.load() == {"n": 5}
