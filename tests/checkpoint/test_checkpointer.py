"""A checkpointer over tiers, on one host: its verbs, its stages, what it restores."""

import os
import pathlib
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import clock, errors, events
from elastic_ckpt.tiers.choices import Local, Peers, Persistent
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.persistent import persistent_root
from tests import shared_memory
from tests.recorded_events import RecordedEvents
from tests.tiers import served

MESH = jax.make_mesh((4, 2), ("a", "b"))
SPEC = PartitionSpec("a", "b")


class Counter:
    """A component."""

    def __init__(self, count=0):
        self.count = count

    async def save(self, directory):
        taken = self.count

        async def write():
            path = await directory.await_creation()
            (path / "count").write_text(str(taken))

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / "count").read_text())

        return read()


def state(step, spec=SPEC):
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    return {
        "params": {
            "w": jax.device_put(values, NamedSharding(MESH, spec)),
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
    return jax.tree.map(
        lambda leaf: (
            np.asarray(
                jax.random.key_data(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else leaf
            ).tobytes()
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*tiers, emit=events.nobody, local="ram", **options):
        chosen = [Local(tmp_path / local, **options), *tiers]
        made.append(frontend.Checkpointer(chosen, run="run", emit=emit))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


def storage(tmp_path, **options):
    return Persistent(tmp_path / "steps", **{"every": 1, **options})


def test_a_step_comes_back_bit_equal_under_another_sharding(make):
    saved = make()
    assert saved.latest is None
    parts = {"state": state(3), "data": Counter(7)}
    assert saved.save_checkpointables(3, parts)
    assert saved.latest.step == 3
    saved.close()
    other = state(0, PartitionSpec(None, ("b", "a")))
    counter, recorded = Counter(), RecordedEvents()
    restored = make(emit=recorded).load_checkpointables(
        None, {"state": abstract(other), "data": counter}
    )
    assert bits(restored["state"]) == bits(state(3))
    assert restored["state"]["params"]["w"].sharding.is_equivalent_to(
        other["params"]["w"].sharding, 2
    )
    assert restored["data"] is counter
    assert counter.count == 7
    (event,) = recorded.named("restored_from")
    assert event["local_bytes"] > 0
    assert event["persistent_bytes"] == event["bad_copies"] == 0


def test_ram_keeps_the_newest_step_and_storage_what_is_due(make, tmp_path):
    recorded = RecordedEvents()
    checkpointer = make(storage(tmp_path, every=2), emit=recorded)
    for step in range(1, 6):
        assert checkpointer.save(step, state(step))
        checkpointer.wait()
    assert [each.step for each in checkpointer.checkpoints] == [2, 4, 5]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 4]
    names = os.listdir(tmp_path / "ram" / "hosts" / "0")
    assert sorted(name.partition("-")[0] for name in names) == ["5", "lock"]


class LateClock(clock.Clock):
    """A clock that is late for the time since the epoch."""

    def __init__(self, late_ns):
        self._late_ns = late_ns

    def time_ns(self):
        return super().time_ns() + self._late_ns


def test_minutes_go_on_from_the_backup_of_the_world_before(tmp_path):
    # Worlds may be shorter than the time between two backups.
    chosen = [Local(tmp_path / "ram", every=1)]
    chosen.append(Persistent(tmp_path / "steps", every_minutes=60))
    stored = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    for step, minutes in ((1, 0), (2, 30), (3, 61)):
        late = LateClock(minutes * 60 * 10**9)
        with clock.replaced(late), frontend.Checkpointer(chosen, run="run") as world:
            parts = {"state": state(step), "data": Counter(step)}
            world.save_checkpointables(step, parts, force=step == 1)
        assert stored.steps() == ([1, 3] if step == 3 else [1])


def test_a_step_that_orbax_alone_saved_is_restored_and_told_as_unverified(
    make, tmp_path
):
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        stock.save_checkpointables(9, {"state": {"w": jnp.arange(4.0)}})
    recorded = RecordedEvents()
    checkpointer = make(storage(tmp_path), emit=recorded)
    assert checkpointer.latest.step == 9
    restored = checkpointer.load(None, {"w": jnp.zeros(4)})
    assert bits(restored) == bits({"w": jnp.arange(4.0)})
    (event,) = recorded.named("degraded")
    assert event["why"] == "plain Orbax saved it, and its values cannot be verified"


def test_what_a_step_holds_is_told_and_can_be_asked_for(make):
    checkpointer = make()
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
    assert bits(checkpointer.load()) == bits(tree)
    restored = checkpointer.load_checkpointables()
    assert bits(restored) == bits({"state": tree, "ema": jnp.arange(4)})
    with pytest.raises(errors.CheckpointError, match="no 'opt'; it has"):
        checkpointer.metadata(checkpointable_name="opt")


def test_what_is_in_ram_is_its_owners_alone(make):
    with shared_memory.directory("private") as directory:
        root = pathlib.Path(directory, "ram")
        # As a volume may be given.
        root.mkdir(mode=0o755)
        before = os.umask(0)
        try:
            checkpointer = make(Peers(), local=root)
            assert checkpointer.save_checkpointables(
                1, {"state": state(1), "data": Counter(7)}
            )
            checkpointer.load_checkpointables(
                None, {"state": abstract(state(0)), "data": Counter()}
            )
            paths = [root, *root.rglob("*")]
            assert {"agent.json", "agents.json", "lock", "count", "zarr.json"} <= {
                path.name for path in paths
            }
            checkpointer.close()
        finally:
            os.umask(before)
        for path in [root, *root.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.slow
def test_a_machine_without_the_secret_reports_the_agents_that_refuse_it(make, tmp_path):
    make(local="idle").save(3, state(3))
    service = agent.Service(root=str(tmp_path / "idle"))
    with served.serving(service) as address:
        recorded = RecordedEvents()
        new = make(Peers(known=(address.url,)), emit=recorded, local="new")
        assert new.latest is None
        (event,) = recorded.named("degraded")
        assert (event["tier"], event["step"]) == ("peer", 0)
        secret_file = tmp_path / "new" / "secret"
        assert (
            f"{address.url} does not take the secret in {secret_file}" in event["why"]
        )
        new.close()
        # The remedy that the event names.
        shutil.copy(tmp_path / "idle" / "secret", secret_file)
        recorded = RecordedEvents()
        again = make(Peers(known=(address.url,)), emit=recorded, local="new")
        assert again.latest.step == 3
        assert recorded.named("degraded") == []


def test_a_step_that_somebody_else_backed_up_is_found_by_looking_again(make, tmp_path):
    checkpointer = make(storage(tmp_path))
    assert checkpointer.latest is None
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        stock.save_checkpointables(4, {"state": {"n": jnp.ones(1)}})
    assert checkpointer.latest is None
    checkpointer.reload()
    assert checkpointer.latest.step == 4
