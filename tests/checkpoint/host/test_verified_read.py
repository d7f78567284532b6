"""Verified reads: what is handed out is what was saved, or an error names it."""

import contextlib
import weakref

import jax
import numpy as np
import pytest
from elastic_ckpt_sidecar import remote_hosts
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import hosts
from elastic_ckpt.checkpoint.host import endpoint, verified_read
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.trees import WantedLeaf
from elastic_ckpt.core import allgather, boxes, errors, host_memory
from elastic_ckpt.steps.read_plan import Nearness
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.source import ReadError
from tests.processes import tier_worlds
from tests.sidecar import simulated_hosts
from tests.tiers import saved_worlds

SHAPES = {"b": (), "w": (8, 6)}


def saved_values(path, box):
    values = saved_worlds.values(path, SHAPES[path])
    return values[(*map(slice, box.start, box.stop), ...)]


class Memory:
    """What a host holds, in memory; it can be damaged, or lost to readers of a byte."""

    directory, is_removed = "memory", False

    def __init__(self, saved):
        leaves = saved.contents.leaves
        self.parts = {
            (leaves[leaf].path, box): bytearray(saved_values(leaves[leaf].path, box))
            for leaf, box, _ in saved.rows()
        }

    def read_into(self, leaf, box, into, on_piece=None):
        if self.is_removed and on_piece is None:
            raise ReadError("is missing")
        into[:] = self.lent(leaf, box)[: len(into)]
        if on_piece is not None:
            on_piece(into)

    def lent(self, leaf, box):
        content = self.parts[leaf.path, box]
        memory = host_memory.allocate(len(content))
        memory[:] = np.frombuffer(content, np.uint8)
        memory.flags.writeable = False
        return memory


def saved(num_hosts):
    """Hosts that hold two of the rows of a leaf, and another leaf."""
    contents = saved_worlds.contents(SHAPES)
    rows = saved_worlds.grid(SHAPES["w"], (num_hosts, 1))
    saved_by = []
    for number in range(num_hosts):
        held = {(1, rows[number]), (1, rows[number - 1]), (0, boxes.whole(()))}
        host = saved_worlds.host(number)
        saved_by.append(saved_worlds.saved_by(host, contents, held))
    return FoundStep(StepTable(saved_by), [Memory(each) for each in saved_by])


@given(
    num_saved=st.integers(1, 8),
    parts=st.tuples(st.integers(1, 8), st.integers(1, 6)),
    maps=st.booleans(),
    is_moved=st.booleans(),
    data=st.data(),
)
def test_any_boxes_are_read_from_any_hosts(num_saved, parts, maps, is_moved, data):
    found = saved(num_saved)
    damaged, bad_name = data.draw(st.integers(0, num_saved - 1)), ""
    if num_saved > 1:
        held = found.sources[damaged].parts
        path, box = data.draw(st.sampled_from(list(held)))
        bit = data.draw(st.integers(0, 8 * len(held[path, box]) - 1))
        held[path, box][bit // 8] ^= 1 << bit % 8
        bad_name = f"{path}{box} at host host-{damaged:02d} "
    rows = saved_worlds.grid(SHAPES["w"], (num_saved, 1))
    grid = saved_worlds.grid(SHAPES["w"], parts)
    # Many boxes use the same memory one after another.
    of_leaf = data.draw(st.lists(st.sampled_from(grid), min_size=1))
    of_leaf *= data.draw(st.sampled_from([1, 20]))
    wanted = [("b", boxes.whole(())), *(("w", box) for box in of_leaf)]
    own = found.table.holders[data.draw(st.integers(0, num_saved - 1))].host
    reader = verified_read.VerifiedReader(found, Nearness(found.table, own), maps=maps)
    made = {"shape": (), "join": list}
    made["place"] = lambda _, values: (values.copy(), values.flags.writeable)
    made["is_moved"] = is_moved
    leaves = [WantedLeaf(path=path, boxes=(box,), **made) for path, box in wanted]
    placed = verified_read.read_leaves(reader, leaves)
    assert all(str(bad).startswith(bad_name) for bad in reader.bad)
    for at, (path, box) in enumerate(wanted):
        (values, is_own), expected = placed[path].pop(0), saved_values(path, box)
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
        assert values.tobytes() == expected.tobytes()
        # A saved box that devices receive stays where it is. Others are copied.
        is_saved = path == "b" or box in rows
        is_lent = maps and is_moved and is_saved
        assert is_lent or is_own
        assert not (is_lent and is_own and wanted.index((path, box)) == at)


class Zeros:
    """Holds zeros."""

    directory = "zeros"

    def read_into(self, _leaf, _box, into, on_piece):
        into[:] = bytes(len(into))
        on_piece(into)


class LentZeros(Zeros):
    def lent(self, leaf, box):
        # Like TensorStore's, which is not aligned as JAX could share it.
        memory = host_memory.allocate(num_bytes := leaf.num_bytes(box)).base
        return memory[memory.ctypes.data % 64 == 0 :][:num_bytes]


@pytest.mark.parametrize("source", [Zeros, LentZeros])
@pytest.mark.parametrize("parts", [(4, 1), (1, 4)])
@pytest.mark.parametrize("apart", [False, True])
def test_at_most_512_mib_are_held_beside_the_state(source, parts, apart, monkeypatch):
    held, most, host = [], [], saved_worlds.host(0)
    shapes = [(2**13, 2**14), (2**12, 2**14)]

    def counted(num_bytes):
        # JAX shares memory that is aligned.
        memory = np.zeros(num_bytes + 63, np.uint8)
        held.append(num_bytes)
        weakref.finalize(memory, held.remove, num_bytes)
        most.append(sum(held))
        return memory[(skipped := -memory.ctypes.data % 64) : skipped + num_bytes]

    monkeypatch.setattr(host_memory, "allocate", counted)
    contents = saved_worlds.contents({f"s/{n}": s for n, s in enumerate(shapes)})
    rows = [(n, b) for n, s in enumerate(shapes) for b in saved_worlds.grid(s, (8, 1))]
    manifest = saved_worlds.saved_by(
        host, contents, rows, values=lambda _, s: np.zeros(s, np.float32)
    )
    found = FoundStep(StepTable([manifest]), [source()])
    monkeypatch.setattr(find, "of_save", lambda *_: found)
    mesh = simulated_hosts.mesh_of(1, apart=True)
    devices = simulated_hosts.hosts_of(mesh, 1, apart=True)
    grid = Mesh(mesh.devices.reshape(parts), ("x", "y"))
    sharding = NamedSharding(grid, PartitionSpec("x", "y"))
    leaves = [jax.ShapeDtypeStruct(s, np.float32, sharding=sharding) for s in shapes]
    with simulated_hosts.Machines() as machines:
        configs = simulated_hosts.choices_of(
            machines, devices, mesh, tier_worlds.tiers, numbers=[0]
        )
        if apart:
            driver = remote_hosts.RemoteHosts(devices, configs)
        else:
            messages = allgather.Allgather(None, "", host=0, num_hosts=1)
            driver = hosts.InEveryProcess(endpoint.HostEndpoint(*configs), messages)
        with contextlib.closing(driver):
            endpoint.join(driver)
            driver.all(HostReader.open_step, found.step_id)
            driver.check({"s": leaves}, (), {})
            driver.read(())
            made = driver.arrays({"s": leaves})["s"]
    assert [each.sharding for each in made] == [sharding] * len(shapes)
    assert 2**20 < max(most) <= 512 * 2**20


def test_without_a_good_copy_the_error_names_leaf_box_and_every_holder():
    found = saved(2)
    first, second = found.sources
    for part in (*first.parts.values(), *second.parts.values()):
        part[:] = bytes(len(part))
    # It was removed while it was read. Its files were taken for a later step, and those
    # who had opened them read that.
    second.is_removed = True
    with pytest.raises(errors.CheckpointError) as caught:
        verified_read.VerifiedReader(found).values(1)
    assert str(caught.value) == (
        "step 30: no good copy of w[0:4, 0:6] is left (at host host-00 it is not what"
        " was saved: its digest differs; at host host-01 it is missing); restore its"
        " files from elsewhere, bring back a host that has a good copy, or restore an"
        " older step"
    )
