"""Hosts that read parts of files check them together, and read little more."""

import itertools
import threading
import types
import zlib
from concurrent import futures

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import allgather, boxes, errors
from elastic_ckpt.universal import stored
from elastic_ckpt.universal.formats import opened
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.moves import Move, Side, Source, TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.reading import read_checks, restored_tree
from elastic_ckpt.universal.reading.byte_source import LocalFiles
from elastic_ckpt.universal.reading.read_checks import ReadChecks
from elastic_ckpt.universal.reading.transfer import Transfer
from elastic_ckpt.universal.stored import Checksum

DTYPE = np.dtype(np.uint8)


class World:
    """The allgathers of hosts that are threads."""

    def __init__(self, num_hosts):
        self.barrier = threading.Barrier(num_hosts)
        self.values = [None] * num_hosts

    def host(self, number):
        return Host(self, number)


class Host:
    def __init__(self, world, number):
        self.world, self.host, self.num_hosts = world, number, len(world.values)

    def gather(self, _kind, value, *, timeout_secs):
        self.world.values[self.host] = value
        self.world.barrier.wait(timeout_secs)
        values = list(self.world.values)
        self.world.barrier.wait(timeout_secs)
        return values

    def run(self, kind, part, *, timeout_secs):
        return self.gather(kind, part(), timeout_secs=timeout_secs)


def checkpoint_of(path, bounds):
    """One tensor that lies in a file of entries with these bounds."""
    content = path.read_bytes()
    place = boxes.whole((len(content),))
    fragment = stored.Fragment(box=place, file=str(path), offset=0, strides=(1,))
    tensor = stored.StoredTensor(
        name="w", dtype=DTYPE, shape=(len(content),), fragments=(fragment,)
    )
    listed = [
        Checksum(a, b, zlib.crc32(content[a:b])) for a, b in itertools.pairwise(bounds)
    ]
    return opened.OpenedCheckpoint(
        format="test", tensors=[tensor], checksums=lambda _: listed
    )


def read(checkpoint, needed, allgather):
    """The bytes of boxes that a host reads, and its checks."""
    (tensor,) = checkpoint.tensors
    side = Side(start=(0,), dims=(0,), steps=(1,))
    move = Move(
        target="w",
        sizes=tensor.shape,
        target_side=side,
        sources=(Source(tensor=0, side=side),),
    )
    target = TargetTensor(name="w", dtype=DTYPE, shape=tensor.shape)
    parts = [boxes.Box(start=(a,), stop=(b,)) for a, b in needed]
    plan = load_plan.plan(checkpoint.tensors, [move], [], {target: parts})
    checks = ReadChecks(checkpoint, plan, plan.files, allgather)
    source = LocalFiles()
    transfer = Transfer(
        plan,
        lambda _: source,
        budget_bytes=2**20,
        is_staged=lambda _: False,
        note=checks.note,
    )
    values = {number: bytes(each) for number, each in transfer.buffers()}
    checks.finish()
    return [values[number] for number in range(len(parts))], checks, plan.total()


def together(checkpoint, needs):
    world = World(len(needs))
    with futures.ThreadPoolExecutor(len(needs)) as pool:
        return [
            pool.submit(read, checkpoint, needed, world.host(number))
            for number, needed in enumerate(needs)
        ]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_the_crc_of_parts_is_that_of_the_whole(parts):
    crc = 0
    for part in parts:
        crc = read_checks.combined(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 60))
    ends = st.integers(0, size)
    bounds = sorted({0, size, *draw(st.sets(ends, max_size=3))})
    needs = []
    for _ in range(draw(st.integers(1, 4))):
        pairs = draw(st.lists(st.tuples(ends, ends), max_size=6))
        needs.append(sorted({(min(p), max(p)) for p in pairs if p[0] != p[1]}))
    return size, bounds, needs


@given(worlds(), st.data())
def test_damage_of_an_entry_is_seen_by_the_hosts_that_read_some_of_it(
    tmp_path_factory, world, data
):
    size, bounds, needs = world
    path = tmp_path_factory.mktemp("files") / "x"
    content = bytearray(range(size))
    path.write_bytes(content)
    checkpoint = checkpoint_of(path, bounds)
    for needed, result in zip(needs, together(checkpoint, needs), strict=True):
        values, _, _ = result.result()
        assert values == [bytes(content[a:b]) for a, b in needed]
    at = data.draw(st.integers(0, size - 1))
    content[at] ^= 1
    path.write_bytes(content)
    first = max(bound for bound in bounds[:-1] if bound <= at)
    last = min(bound for bound in bounds if bound > at)
    results = together(checkpoint, needs)
    for needed, result in zip(needs, results, strict=True):
        # What lies between is so little that it is read, too.
        if needed and needed[0][0] < last and first < max(b for _, b in needed):
            with pytest.raises(FormatError, match=f"bytes {first} to {last}"):
                result.result()
        else:
            result.result()


def test_bytes_between_those_that_are_needed_are_checked_as_they_were_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    needed = [(0, 10), (20, 30), (40, 50), (70, 90)]
    (result,) = together(checkpoint_of(path, [0, 100]), [needed])
    assert result.result()[0] == [bytes(range(a, b)) for a, b in needed]


def test_hosts_read_a_file_once_together(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    checkpoint = checkpoint_of(path, [0, 1 << 19, 1 << 20])
    part = (1 << 20) // 16
    needs = [[(n * part, n * part + part - 512)] for n in range(16)]
    results = [each.result() for each in together(checkpoint, needs)]
    read_bytes = sum(total.read_bytes for _, _, total in results)
    extra = sum(checks.extra_bytes for _, checks, _ in results)
    assert read_bytes + extra == 1 << 20
    assert max(checks.extra_bytes for _, checks, _ in results) <= 2 * 512


def test_a_host_that_cannot_read_ends_the_others_with_its_message(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(64))
    world = World(2)

    def fails():
        host = world.host(1)
        ReadChecks(*_of(path), host)
        read_checks.fail(host, OSError("the disk is gone"))

    def _of(path):
        checkpoint = checkpoint_of(path, [0, 64])
        plan = load_plan.plan(checkpoint.tensors, [], [], {})
        return checkpoint, plan, plan.files

    with futures.ThreadPoolExecutor(2) as pool:
        reading = pool.submit(
            read, checkpoint_of(path, [0, 64]), [(0, 8)], world.host(0)
        )
        pool.submit(fails).result()
        with pytest.raises(errors.RunError, match="the disk is gone"):
            reading.result()


@pytest.mark.slow
def test_a_host_without_a_plan_ends_the_others_with_its_message(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(bytes(64))
    checkpoint = checkpoint_of(path, [0, 64])
    world = World(2)
    monkeypatch.setattr(allgather, "shared", lambda: world.host(1))
    leaf = types.SimpleNamespace(boxes=[boxes.whole((64,))])
    wanted = restored_tree.TargetLeaf(
        tensor=TargetTensor(name="w", dtype=DTYPE, shape=(64,)),
        leaf=leaf,
        is_staged=False,
    )
    with futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, checkpoint, [(0, 8)], world.host(0))
        with pytest.raises(errors.CheckpointError, match="nothing fills 64"):
            restored_tree.read_leaves(checkpoint, [], [], [wanted])
        with pytest.raises(errors.RunError, match="nothing fills 64"):
            reading.result()
