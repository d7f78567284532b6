"""What is captured lies in the files of its step, which later steps take again."""

import contextlib
import os
import pathlib
import resource

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES

LARGE = 3 * LEAST_BYTES


@pytest.fixture
def host(tmp_path):
    disk = ram_disk.RamDisk(tmp_path / "ram", run="run-7")
    with contextlib.closing(local.LocalHost(disk, slot=0, domains={}, number=0)) as own:
        yield own


def state(step, large=LARGE):
    random = np.random.default_rng(step)
    return {
        "large": random.integers(0, 256, large, np.uint8),
        "matrix": random.standard_normal((512, 1024)).astype(np.float32),
        "small": np.full(5, step),
    }


def save(host, step, values, memory):
    """Saves values; returns the manifest, and the chunks that were in files."""
    captured = capture.capture(values, memory)
    files = [each for part in captured.parts for each in part.files]
    contents = manifest.Contents(leaves=captured.leaves, components=())
    writer = host.begin(StepId(step, "0"), contents)
    writer.reserve(captured.num_bytes, taken_bytes=captured.file_bytes)
    writer.write(captured)
    captured.release()
    return writer.commit(), files


def path_of(host, saved, name):
    leaves = saved.contents.leaves
    files = [layout.part_file(leaves[leaf], box) for leaf, box, _ in saved.rows()]
    (file,) = (each for each in files if each.startswith(f"{name}/"))
    return host.disk.step_directory(0, saved.step_id) / file


def check(host, saved, values):
    """Compares a step with what was saved: files, digests, and as TensorStore reads."""
    for leaf, _, named in saved.rows():
        name = saved.contents.leaves[leaf].path
        assert named == digest.values_digest(values[name])
        directory = host.disk.step_directory(0, saved.step_id) / name
        spec = {"driver": "file", "path": os.fspath(directory)}
        array = ts.open({"driver": "zarr3", "kvstore": spec}).result()
        assert array.read().result().tobytes() == values[name].tobytes()


def spare(host):
    directory = host.disk.host_directory(0) / ram_disk.SPARE
    return sorted(os.listdir(directory)) if directory.exists() else []


def test_a_step_takes_the_files_of_one_that_was_removed(host):
    memory = capture.Memory(host.files)
    inodes = []
    for step in range(1, 6):
        saved, files = save(host, step, state(step), memory)
        # Large chunks are copied straight into the files of their step.
        assert len(files) == 2
        check(host, saved, state(step))
        inodes.append(os.stat(path_of(host, saved, "large")).st_ino)
        if step > 1:
            host.remove(StepId(step - 1, "0"))
    assert inodes[2:] == inodes[:3]
    assert host.disk.known_saves() == [StepId(5, "0")]


def test_a_copy_that_was_repaired_is_not_written_to_by_later_steps(host):
    memory = capture.Memory(host.files)
    saved, _ = save(host, 1, state(1), memory)
    leaf = saved.contents.leaves[0]
    content = stored_part.content(leaf, state(1)["large"])
    files = ram_disk.StepFiles(host.disk.step_directory(0, saved.step_id))
    files.put_right(leaf, boxes.whole(leaf.shape), content)
    host.remove(StepId(1, "0"))
    for step in (2, 3):
        saved, _ = save(host, step, state(step), memory)
        check(host, saved, state(step))
        host.remove(StepId(step, "0"))


def test_spare_files_take_no_more_than_the_last_step(host):
    memory = capture.Memory(host.files)
    for step in (1, 2, 3):
        save(host, step, state(step), memory)
    for step in (1, 2, 3):
        host.remove(StepId(step, "0"))
    assert host.files.spare_bytes == LARGE + 4 * 512 * 1024 + 2 * 4
    saved, _ = save(host, 4, state(4, large=LARGE + 1), memory)
    check(host, saved, state(4, large=LARGE + 1))


def test_files_that_were_made_ahead_are_those_of_the_next_step(host):
    save(host, 1, state(1), capture.Memory(host.files))
    sizes = [each.nbytes for each in state(1).values()]
    # What is there is not made again.
    for _ in range(2):
        host.prepare(sizes)
    saved, _ = save(host, 2, state(2), capture.Memory(host.files))
    check(host, saved, state(2))
    host.files.close()
    assert host.files.num_made == 4
    assert spare(host) == []


def test_files_are_made_ahead_for_a_state_that_was_restored(host):
    values = {**state(1), "w": jnp.zeros((512, 1024))}
    # Nothing is said of what cannot be saved before it is.
    capture.prepare({**values, "text": np.array(["a"])}, host, pinned_bytes=LARGE)
    _, files = save(host, 1, values, capture.Memory(host.files))
    assert len(files) == 3
    assert host.files.num_made == 3


def test_no_file_is_made_ahead_without_room(tmp_path):
    disk = ram_disk.RamDisk(tmp_path / "ram", run="run-7", limit_bytes=LARGE)
    with contextlib.closing(local.LocalHost(disk, slot=0, domains={}, number=0)) as own:
        own.prepare([LARGE, LARGE])
    assert own.files.num_made == 0


@contextlib.contextmanager
def no_larger_files_than(num_bytes):
    """As on a full disk, no file can be made that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_is_captured_in_memory(host):
    values = state(1)
    with no_larger_files_than(LEAST_BYTES):
        captured = capture.capture(values, capture.Memory(host.files))
    assert [dict(part.files) for part in captured.parts] == [{}, {}, {}]
    for part in captured.parts:
        ((_, copy),) = part.boxes
        assert copy.tobytes() == values[part.leaf.path].tobytes()
    captured.release()
    assert spare(host) == []


def test_a_capture_that_fails_or_is_abandoned_leaves_no_file_and_no_memory(
    host, tmp_path
):
    leaf = manifest.Leaf(path="w", shape=(LARGE,), dtype="uint8")
    shards = capture.Shards(
        leaf=leaf,
        shard_shape=leaf.shape,
        boxes=((boxes.whole(leaf.shape), np.zeros(2 * LARGE, np.uint8)),),
        kept=False,
    )
    with pytest.raises(TypeError, match="buffer is too small"):
        capture.capture({**state(1), "w": shards}, capture.Memory(host.files))
    captured = capture.capture(state(1), capture.Memory(host.files))
    assert spare(host)
    contents = manifest.Contents(leaves=captured.leaves, components=())
    writer = host.begin(StepId(1, "0"), contents)
    writer.write(captured)
    captured.release()
    writer.abandon()
    assert spare(host) == []
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps


def test_what_is_captured_on_one_host_leaves_room_for_another(tmp_path):
    # The room is for one step of each, and no more.
    disk = ram_disk.RamDisk(tmp_path / "ram", run="run-7", limit_bytes=3 * LARGE)
    with contextlib.ExitStack() as stack:
        hosts = [local.LocalHost(disk, slot=n, domains={}, number=n) for n in range(2)]
        writers = []
        for own in hosts:
            stack.callback(own.close)
            values = {"large": np.zeros(LARGE + LARGE // 4, np.uint8)}
            captured = capture.capture(values, capture.Memory(own.files))
            contents = manifest.Contents(leaves=captured.leaves, components=())
            writers.append((captured, own.begin(StepId(1, "0"), contents)))
        for captured, writer in writers:
            sizes = captured.num_bytes, captured.file_bytes
            writer.reserve(sizes[0], taken_bytes=sizes[1])
        for captured, writer in writers:
            writer.write(captured)
            writer.commit()
        assert 0 <= disk.free_bytes() < LARGE


def test_spare_files_make_room_under_the_limit_of_a_machine(tmp_path):
    limit = LARGE + LEAST_BYTES
    disk = ram_disk.RamDisk(tmp_path / "ram", run="run-7", limit_bytes=limit)
    with contextlib.closing(local.LocalHost(disk, slot=0, domains={}, number=0)) as own:
        memory = capture.Memory(own.files)
        for step, size in ((1, LARGE), (2, LARGE + 8)):
            values = {"large": np.full(size, step, np.uint8)}
            saved, _ = save(own, step, values, memory)
            check(own, saved, values)
            if step == 1:
                own.remove(StepId(1, "0"))
                assert own.files.spare_bytes
        assert own.files.spare_bytes == 0


def test_a_process_removes_the_spare_files_of_one_that_was_killed(tmp_path):
    disk = ram_disk.RamDisk(tmp_path / "ram", run="run-7")
    left = [
        pathlib.Path(disk.host_directory(slot)) / ram_disk.SPARE / "3"
        for slot in (0, 1)
    ]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"left")
    with contextlib.closing(local.LocalHost(disk, slot=0, domains={}, number=0)) as own:
        own.clean()
    assert not any(path.exists() for path in left)
