"""Tiers under a single controller: hosts keep and restore what the head only names."""

import functools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elastic_ckpt_sidecar import arrays, messages, remote_hosts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend as front_door
from elastic_ckpt.checkpoint import checkpointer as checkpointer_module
from elastic_ckpt.checkpoint import restore as restore_module
from elastic_ckpt.core import errors, storage
from elastic_ckpt.inspect import tier_locations, verification
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import peer_client
from tests.checkpoint import stock_program
from tests.processes import tier_worlds
from tests.sidecar import held_pipeline, simulated_hosts


def save(checkpointer, mesh, step, *, sharded=True):
    tier_worlds.save(checkpointer, mesh, steps=[step], sharded=sharded)


def restore(checkpointer, mesh, step, *, sharded=True):
    tier_worlds.restore(checkpointer, mesh, step=step, sharded=sharded)


def event(recorded, name):
    (event,) = (each for each in recorded if each["event"] == name)
    return event


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_four_hosts_save_and_any_number_restores(machines, monkeypatch, sharded):
    with simulated_hosts.world(machines, 4, slices=2) as (checkpointer, mesh, _):
        save(checkpointer, mesh, 3, sharded=sharded)
        save(checkpointer, mesh, 4, sharded=sharded)
    for num_hosts in (2,) if sharded else (2, 8):
        restored_from_ram(machines, num_hosts, sharded=sharded)
    # Without the machine that has the head, too.
    machines.lose(0)
    monkeypatch.setattr(peer_client, "RETRY_SECS", (0.0,))
    restored_from_ram(machines, 2, sharded=sharded, numbers=[1, 2])


def restored_from_ram(machines, num_hosts, *, sharded, **how):
    with simulated_hosts.world(machines, num_hosts, **how) as (ours, mesh, recorded):
        restore(ours, mesh, 4, sharded=sharded)
    assert event(recorded, "restored_from")["persistent_bytes"] == 0
    assert not [each for each in recorded if each["event"] == "step_passed_over"]


@pytest.mark.slow
def test_storage_alone_has_each_box_once_for_any_number_of_hosts(machines, tmp_path):
    alone = {"persistent": str(tmp_path / "steps"), "storage_alone": True}
    with simulated_hosts.world(machines, 4, slices=2, **alone) as (
        ours,
        mesh,
        recorded,
    ):
        save(ours, mesh, 3, sharded=False)
        save(ours, mesh, 4, sharded=False)
    assert [each["step"] for each in recorded if each["event"] == "backed_up"] == [3, 4]
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        wanted = {"state": tier_worlds.abstract(mesh, False)}
        restored = stock.load_checkpointables(4, wanted)
    tier_worlds.check(restored["state"], step=4)
    location = tier_locations.at_path(tmp_path / "steps", run="run")
    stored = tier_locations.Locations([location])
    verified = verification.verify(stored, stored.known, progress=lambda *_: None)
    assert verified.passed(strict=True)
    (found,) = stored.look(4).saves
    assert len(found.table.holder) == len(found.table)
    for num_hosts in (2, 8):
        with simulated_hosts.world(machines, num_hosts, **alone) as (
            ours,
            mesh,
            events,
        ):
            restore(ours, mesh, 4, sharded=False)
            assert event(events, "restored_from")["persistent_bytes"] > 0


@pytest.mark.slow
def test_the_data_iterator_goes_on_where_the_step_was_saved(machines, remote):
    batches = remote(held_pipeline.data(), size=8)
    with simulated_hosts.world(machines, 4) as (checkpointer, mesh, _):
        for step in (1, 2):
            assert held_pipeline.number(next(batches)) == step - 1
            checkpointables = {
                "state": tier_worlds.state(mesh, step, True),
                "data": batches,
            }
            assert checkpointer.save_checkpointables(step, checkpointables)
    batches = remote(held_pipeline.data(), size=8)
    with simulated_hosts.world(machines, 2) as (checkpointer, mesh, _):
        wanted = {"state": tier_worlds.abstract(mesh, True), "data": batches}
        tier_worlds.check(
            checkpointer.load_checkpointables(None, wanted)["state"], step=2
        )
    assert held_pipeline.number(next(batches)) == 2


def abstract(leaf):
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return type(leaf)(0) if np.ndim(leaf) == 0 else np.zeros_like(leaf)


@pytest.mark.parametrize("group_bytes", [arrays.GROUP_BYTES, 80])
def test_leaves_of_all_kinds_come_back_bit_by_bit(machines, group_bytes, monkeypatch):
    # A device's leaf of more than 40 bytes comes in parts.
    head = functools.partial(arrays.HeadArrays, group_bytes=group_bytes)
    monkeypatch.setattr(remote_hosts, "HeadArrays", head)
    with simulated_hosts.world(machines, 2, slices=2, apart=True) as (tiers, mesh, _):
        alone = mesh.devices.flat[1]
        other = Mesh(mesh.devices[::-1, ::-1].T, ("a", "b"))
        state = stock_program.state(mesh) | {
            "alone": jax.device_put(jnp.arange(30.0), alone),
            "empty": jax.device_put(jnp.zeros((0, 3)), alone),
            "other": jax.device_put(
                jnp.arange(8.0), NamedSharding(other, PartitionSpec("b"))
            ),
            "wide": np.arange(4, dtype=">i8") << 40,
        }
        assert tiers.save_checkpointables(1, {"state": state})
        restored = tiers.load(1, jax.tree.map(abstract, state))
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        for leaf, saved in zip(
            jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
        ):
            assert type(leaf) is type(saved)
            np.testing.assert_array_equal(
                stock_program.data(leaf), stock_program.data(saved), strict=True
            )
            if isinstance(leaf, jax.Array):
                assert leaf.sharding == saved.sharding


def test_arrays_may_be_donated_as_soon_as_the_save_has_begun(machines):
    with simulated_hosts.world(machines, 2) as (checkpointer, mesh, _):
        state = tier_worlds.state(mesh, 1, True)
        saving = checkpointer.save_checkpointables_async(1, {"state": state})
        jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(state)
        for array in jax.tree.leaves(state):
            array.delete()
        assert saving.result()
        tier_worlds.check(
            checkpointer.load(1, tier_worlds.abstract(mesh, True)), step=1
        )


def counting(monkeypatch):
    """Returns how many bytes of messages have passed through the head, both ways.

    But for the questions whether hosts have answered, which are as many as it takes.
    """
    sizes, write, rows = [], messages.encode, messages.rows

    def encode(content, sharding):
        written = write(content, sharding)
        if content.keys() != {"call"}:
            sizes.append(written.nbytes // len(written))
        return written

    def rows_of(array):
        local_rows = rows(array)
        if local_rows.ndim > 1:
            sizes.append(local_rows.nbytes)
        return local_rows

    monkeypatch.setattr(messages, "encode", encode)
    monkeypatch.setattr(messages, "rows", rows_of)
    return lambda: sum(sizes)


@pytest.mark.slow
def test_bytes_of_arrays_do_not_pass_through_the_head(machines, monkeypatch):
    passed = []
    for width in (1, 64):
        with (
            monkeypatch.context() as patch,
            simulated_hosts.world(machines, 2, apart=True) as (checkpointer, mesh, _),
        ):
            values = np.random.default_rng(width).random((8, 128 * width), np.float32)
            state = {
                "sharded": jax.device_put(
                    values, NamedSharding(mesh, PartitionSpec("fsdp"))
                ),
                "whole": jax.device_put(values, NamedSharding(mesh, PartitionSpec())),
            }
            # The second world has found a step, and would say first that none is read.
            assert len(checkpointer.checkpoints) == len(passed)
            num_bytes = counting(patch)
            assert checkpointer.save_checkpointables(width, {"state": state})
            checkpointer.wait()
            restored = checkpointer.load(width, jax.tree.map(abstract, state))
            checkpointer.wait()
            passed.append(num_bytes())
            for array in restored.values():
                assert np.asarray(array).tobytes() == values.tobytes()
    assert passed[0] == passed[1]


def test_a_host_that_cannot_take_part_says_so_at_the_beginning(machines):
    directory = pathlib.Path(machines.directory(1))
    directory.joinpath("hosts").write_text("")
    with (
        pytest.raises(
            errors.HostsFailedError, match=r"host 1: .*(File exists|Not a directory)"
        ),
        simulated_hosts.world(machines, 2),
    ):
        pass


def test_a_leaf_that_cannot_be_saved_is_named(machines):
    with simulated_hosts.world(machines, 2, apart=True) as (checkpointer, mesh, _):
        elsewhere = jax.device_put(1.0, jax.devices()[7])
        for leaf, why in (
            (b"bytes", "state/x is of type bytes"),
            (elsewhere, "leaf 'state/x' is on .* not in this checkpointer's mesh"),
        ):
            with pytest.raises(errors.CheckpointError, match=why):
                checkpointer.save_checkpointables(1, {"state": {"x": leaf}})
        save(checkpointer, mesh, 2)
        restore(checkpointer, mesh, 2)


class Unwritable(tier_worlds.Counter):
    """A component whose writing fails after its first files."""

    async def save(self, directory):
        written = await super().save(directory)

        async def write():
            await written
            raise OSError("no more")

        return write()


class Refusing(tier_worlds.Counter):
    """A component that fails before it gives a writer, with a file there."""

    async def save(self, directory):
        path = await directory.await_creation()
        (path / "half").write_text("")
        raise OSError("no more")


def test_files_of_components_reach_a_host_whose_memory_the_head_does_not_see(
    machines, monkeypatch
):
    seen = []

    def remove(path):
        seen.append(pathlib.Path(path))
        storage.remove(path)

    # Records the removals of the head alone.
    spied = types.SimpleNamespace(**{**vars(storage), "remove": remove})
    monkeypatch.setattr(checkpointer_module, "storage", spied)
    monkeypatch.setattr(restore_module, "storage", spied)
    unknown = types.SimpleNamespace(find=lambda _: None)
    monkeypatch.setattr(remote_hosts, "machine", unknown)
    with simulated_hosts.world(machines, 2) as (checkpointer, _, _):
        checkpointables = {"data": tier_worlds.Counter(5)}
        assert checkpointer.save_checkpointables(5, checkpointables)
        # The head keeps no copy of what it sent.
        assert seen[0].name.startswith("5-")
        assert not seen[0].exists()
        restored = tier_worlds.Counter()
        checkpointer.load_checkpointables(None, {"data": restored})
        assert restored.step == 5
        assert seen[1] == pathlib.Path(machines.directory(0), "hosts/0/restored/data")
        # Nor of what a component did not finish, and the step is given up.
        assert not checkpointer.save_checkpointables(6, {"data": Unwritable(6)})
        assert seen[2].name.startswith("6-")
        assert not checkpointer.save_checkpointables(7, {"data": Refusing(7)})
        assert seen[3].name.startswith("7-")
        assert not seen[3].exists()
        assert checkpointer.latest.step == 5


@pytest.mark.parametrize("with_ram", [True, False])
def test_a_single_controller_is_known_by_its_mesh_and_sends_itself_no_files(
    machines, monkeypatch, tmp_path, with_ram
):
    monkeypatch.setattr(front_door.topology, "is_single_controller", lambda _: True)
    mesh = simulated_hosts.mesh_of(1)
    tiers = [choices.Persistent(tmp_path / "steps", every=1)]
    tiers += tier_worlds.tiers(machines.directory(0)) if with_ram else []
    with front_door.Checkpointer(tiers, mesh=mesh) as made:
        assert isinstance(made._hosts, remote_hosts.RemoteHosts)
        # The head has the memory of host 0.
        assert not made._hosts.is_apart
        save(made, mesh, 1)
        restore(made, mesh, 1)
        made.save_checkpointables(2, {"data": tier_worlds.Counter(2)})
        restored = tier_worlds.Counter()
        made.load_checkpointables(2, {"data": restored})
        assert restored.step == 2
    # Once more does nothing.
    made.close()
