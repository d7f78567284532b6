"""Verified reads: what is handed out is what was saved, or an error names it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.trees import WantedLeaf
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps.read_plan import Nearness
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.find import FoundStep
from tests.tiers import saved_worlds


class Memory:
    """What a host of `saved_worlds` holds, in memory; it can be damaged."""

    directory = "memory"

    def __init__(self, saved):
        self.parts = {}
        for number, box, _ in saved.rows():
            leaf = saved.contents.leaves[number]
            leaf_values = saved_worlds.values(leaf.path, leaf.shape)
            place = tuple(map(slice, box.start, box.stop))
            self.parts[leaf.path, box] = bytearray(leaf_values[place].tobytes())

    def read_into(self, leaf, box, into, on_piece=source.ignored):
        part = self.parts.get((leaf.path, box))
        if part is None:
            raise source.ReadError("is missing")
        into[:] = part[: len(into)]
        on_piece(into)
        return len(part)

    def mapped(self, leaf, box):
        part = self.parts.get((leaf.path, box))
        if part is None:
            raise source.ReadError("is missing")
        return np.frombuffer(bytes(part), np.uint8)


SHAPE = (8, 6)


def saved(num_hosts, *, copies=1):
    """Hosts that hold the rows of two leaves, each `copies` times."""
    contents = saved_worlds.contents({"b": (), "w": SHAPE})
    rows = saved_worlds.grid(SHAPE, (num_hosts, 1))
    saved_by = []
    for number in range(num_hosts):
        held = [(1, rows[(number + turn) % num_hosts]) for turn in range(copies)]
        held.append((0, boxes.whole(())))
        host = saved_worlds.host(number, hosts=num_hosts)
        saved_by.append(saved_worlds.saved_by(host, contents, held))
    return FoundStep(StepTable(saved_by), [Memory(each) for each in saved_by])


def read(found, wanted, *, host=0, maps=False, is_moved=False):
    """The values of `wanted` (path and box) as they were read, and the reader."""
    own = saved_worlds.host(host, hosts=len(found.table.holders))
    reader = verified_read.VerifiedReader(found, Nearness(found.table, own))
    leaves = [
        WantedLeaf(
            path=path,
            shape=(),
            boxes=(box,),
            place=lambda _, values: values,
            join=list,
            is_moved=is_moved,
        )
        for path, box in wanted
    ]
    placed = verified_read.read_leaves(reader, leaves, maps=maps)
    return [placed[path].pop(0) for path, _ in wanted], reader


@given(
    num_saved=st.integers(1, 8),
    parts=st.tuples(st.integers(1, 8), st.integers(1, 6)),
    maps=st.booleans(),
    is_moved=st.booleans(),
    data=st.data(),
)
def test_any_boxes_are_read_bit_equal_from_any_number_of_hosts(
    num_saved, parts, maps, is_moved, data
):
    found = saved(num_saved)
    of_leaf = data.draw(
        st.lists(st.sampled_from(saved_worlds.grid(SHAPE, parts)), min_size=1)
    )
    wanted = [("b", boxes.whole(())), *(("w", box) for box in of_leaf)]
    read_values, _ = read(found, wanted, maps=maps, is_moved=is_moved)
    assert len(read_values) == len(wanted)
    for at, ((path, box), values) in enumerate(zip(wanted, read_values, strict=True)):
        shape = SHAPE if path == "w" else ()
        whole = saved_worlds.values(path, shape)
        expected = whole[(*map(slice, box.start, box.stop), ...)]
        assert values.dtype == expected.dtype
        assert values.shape == expected.shape
        assert values.tobytes() == expected.tobytes()
        # A saved box that devices receive stays where it is. Others are copied.
        is_saved = path == "b" or box in saved_worlds.grid(SHAPE, (num_saved, 1))
        is_first = wanted.index((path, box)) == at
        is_mapped = maps and is_moved and is_saved and is_first
        assert values.flags.writeable == (not is_mapped)


@given(
    bit=st.integers(0, 8 * 4 * 8 * 6 - 1), host=st.integers(0, 3), maps=st.booleans()
)
def test_a_flipped_bit_is_read_from_the_next_holder_and_named(bit, host, maps):
    found = saved(4, copies=2)
    in_row = 8 * 4 * 6 * 2
    row = bit // in_row
    box = saved_worlds.grid(SHAPE, (4, 1))[row]
    found.sources[row].parts["w", box][bit % in_row // 8] ^= 1 << bit % 8
    (values,), reader = read(found, [("w", boxes.whole(SHAPE))], host=host, maps=maps)
    assert values.tobytes() == saved_worlds.values("w", SHAPE).tobytes()
    for bad in reader.bad:
        assert bad.host == found.table.holders[row].host.id
        assert str(bad).startswith(f"w[{2 * row}:{2 * row + 2}, 0:6] at host host-0")


def test_without_a_good_copy_the_error_names_leaf_box_and_every_holder():
    found = saved(2, copies=2)
    first, second = found.sources
    for part in first.parts.values():
        part[0] ^= 1
    second.parts.clear()
    with pytest.raises(errors.CheckpointError) as caught:
        read(found, [("w", boxes.whole(SHAPE))])
    message = str(caught.value)
    assert message.startswith("step 30: no good copy of w[")
    assert "at host host-00 it is not what was saved" in message
    assert "at host host-01 it is missing" in message
    assert message.endswith("bring back a host that has it, or restore an older step")


def test_a_step_that_is_removed_while_it_is_read_is_missing_not_damaged():
    found = saved(1)
    (memory,) = found.sources

    def read_into(leaf, box, into, on_piece=None):
        if on_piece is None:
            raise source.ReadError(f"{leaf.path}{box} is missing")
        return Memory.read_into(memory, leaf, box, into, on_piece)

    # Its files are taken for a later step, and those who have opened them read that.
    memory.read_into = read_into
    for part in memory.parts.values():
        part[:] = bytes(len(part))
    with pytest.raises(errors.CheckpointError, match="is missing") as raised:
        read(found, [("w", boxes.whole(SHAPE))])
    assert "digest" not in str(raised.value)
