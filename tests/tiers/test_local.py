"""What a process holds in RAM: its steps, and the files that later steps take."""

import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import shutil
import stat
import subprocess
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, checked_blobs, digest, errors, storage
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import choices, source, stored_part
from elastic_ckpt.tiers.ram import local, machine, ram_disk
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES
from tests import seams, shared_memory
from tests.checkpoint.host.test_capture import random_bits
from tests.tiers.tiered_steps import steps_of

RUN = "run-7"
STATE = {"step": 3, "w": np.arange(24, dtype=np.float32).reshape(4, 6)}
NOTHING = manifest.Contents(leaves=(), components=())
LARGE = 3 * LEAST_BYTES
# The large files of the state below, and their checksums.
LARGE_BYTES = LARGE + 4 * 512 * 1024 + 2 * layout.CHECKSUM_BYTES


def large_state(step, large=LARGE):
    random = np.random.default_rng(step)
    return {
        "large": random.integers(0, 256, large, np.uint8),
        "matrix": random.random((512, 1024), np.float32),
        "small": np.full(5, step),
    }


@pytest.fixture
def disk(tmp_path):
    return ram_disk.RamDisk(tmp_path / "disk", run=RUN)


def opened(disk, slot):
    host = local.LocalHost(disk, slot=slot, domains={}, number=slot)
    return contextlib.closing(host)


@pytest.fixture
def host(disk):
    with opened(disk, 0) as host:
        yield host


def save(host, state=STATE, step=3, *, save="0", only=lambda _: True):
    """Saves of the boxes of each array those of some numbers."""
    captured = capture.capture(state, capture.Memory(host.files))
    whole = manifest.Contents(leaves=captured.leaves, components=())
    captured.arrays = tuple(
        array._replace(boxes=tuple(b for n, b in enumerate(array.boxes) if only(n)))
        for array in captured.arrays
    )
    writer = host.begin(StepId(step, save), whole)
    writer.reserve(captured.num_bytes, taken_bytes=captured.file_bytes)
    writer.write(captured)
    captured.release()
    return writer.commit()


def read(files, leaf, box):
    """The values of a part, as a restore reads them, and mapped."""
    values = np.empty(box.shape, leaf.dtype)
    files.read_into(leaf, box, memoryview(values.reshape(-1).view(np.uint8)))
    mapped = files.lent(leaf, box)
    assert mapped.tobytes() == values.tobytes()
    assert not mapped.flags.writeable
    return values


def check(disk, state, step, directory=None):
    """Compares a step with what was saved, as we and as TensorStore read it."""
    whole, num_read = {}, 0
    held, problems = disk.offers(step)
    assert not problems
    for saved, files in held:
        for number, box, named in saved.rows():
            leaf = saved.contents.leaves[number]
            values = read(files, leaf, box)
            assert digest.values_digest(values) == named
            whole.setdefault(leaf.path, np.zeros(leaf.shape, leaf.dtype))
            whole[leaf.path][tuple(map(slice, box.start, box.stop))] = values
            num_read += values.size
    assert num_read == sum(map(np.size, state.values()))
    directory = directory or disk.step_directory(0, StepId(step, "0"))
    for name, values in state.items():
        expected = np.asarray(values).tobytes()
        assert whole[name].tobytes() == expected
        kvstore = {"driver": "file", "path": f"{directory}/{name}"}
        array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
        assert np.asarray(array.read().result()).tobytes() == expected


def test_we_and_tensorstore_read_what_hosts_saved(disk, host, tmp_path, monkeypatch):
    monkeypatch.setattr(layout.chunk_shape, "__kwdefaults__", {"chunk_bytes": 100})
    state = {name: random_bits(name, 24) for name in sorted(capture.STORABLE)}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    values = random_bits("float32", 128).reshape(8, 16)
    specs = [("a", "b"), ("b", None), (None, ("a", "b")), ()]
    for number, spec in enumerate(specs):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        state[f"w{number}"] = jax.device_put(values, sharding)
    state |= {"number": np.int32(-1), "zero": jnp.zeros((4, 4))}
    with opened(disk, 1) as other:
        saved = [save(host, state, only=lambda n: n % 2 == 0)]
        saved.append(save(other, state, only=lambda n: n % 2 == 1))
    for slot, each in enumerate(saved):
        directory = disk.step_directory(slot, StepId(3, "0"))
        for number, box, _ in each.rows():
            leaf = each.contents.leaves[number]
            length = (directory / layout.part_file(leaf, box)).stat().length
            assert length == leaf.num_bytes(box) + layout.CHECKSUM_BYTES <= 104
        shutil.copytree(directory, tmp_path / "union", dirs_exist_ok=True)
    check(disk, state, 3, tmp_path / "union")


def test_saves_of_a_step_are_held_apart_and_replace_leftovers_alone(disk, host):
    junk = disk.step_directory(0, StepId(3, "0")) / "junk" / "c"
    storage.write_atomic(junk / "0", b"of a dead process")
    both = [save(host, save=name).step_id for name in ("0", "1")]
    assert not junk.exists()
    offered = [each.step_id for each, _ in disk.offers(3).held]
    assert sorted(offered) == host.held() == both
    with pytest.raises(errors.CheckpointError, match=r"save '0', is already in .*/3-0"):
        save(host)
    assert host.being_written == set()
    path, of_other = (disk.manifest_path(0, each) for each in both)
    shutil.copy(of_other, path)
    ((there, _),), (problem,) = disk.offers(3)
    assert there.step_id == both[1]
    assert problem.startswith(f"manifest {path} belongs to save '1', not to '0'")
    removed = []
    with seams.watched(lambda change, path: removed.append((change, path))):
        host.remove(StepId(3, "0"))
    # A manifest goes before the files that it names.
    first = next(path for change, path in removed if change == "remove")
    assert first == os.fspath(disk.manifest_path(0, StepId(3, "0")))
    assert host.held() == [(3, "1")]
    assert steps_of(disk) == [3]


def test_what_is_held_has_the_time_and_metrics_of_its_save(disk, host, monkeypatch):
    writer = host.begin(StepId(3, "0"), NOTHING)
    known = dataclasses.replace(NOTHING, time_ms=1500, metrics='{"loss":NaN}')
    writer.commit(contents=known)
    save(host, step=4)
    disk.manifest_path(0, StepId(4, "0")).write_text("{}")
    first, spoilt = host.retained()
    assert (first.step, first.time.timestamp(), first.complete) == (3, 1.5, True)
    assert np.isnan(first.metrics["loss"])
    assert (spoilt.step, spoilt.metrics, spoilt.complete) == (4, None, False)

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "read_bytes", fail)
    assert [each.complete for each in host.retained()] == [None, None]


def test_what_cannot_give_the_bytes_is_a_read_error(disk, host):
    saved = save(host, {"w": np.arange(3.0)})
    ((_, files),) = disk.offers(3).held
    ((number, box, _),) = saved.rows()
    part = saved.contents.leaves[number], box
    path = pathlib.Path(disk.step_directory(0, StepId(3, "0")), "w", "c", "0")

    def is_refused(message):
        for act in (lambda *each: read(files, *each), files.lent):
            with pytest.raises(source.ReadError, match=message):
                act(*part)

    for num_bytes in (20, 0):
        os.truncate(path, num_bytes)
        is_refused(f"ends after {num_bytes} bytes, but should be 24 bytes long")
    path.unlink()
    is_refused("is missing")
    path.mkdir()
    is_refused("cannot be read")


@contextlib.contextmanager
def no_larger_files_than(num_bytes):
    """As on a full disk, no file can be made that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_is_a_clear_error_and_leaves_nothing(disk, host):
    save(host, {"w": np.ones(2**17)}, 2)
    writer = host.begin(StepId(3, "0"), NOTHING)
    assert host.being_written == {(3, "0")}
    with pytest.raises(errors.CheckpointError, match="without a limit"):
        writer.reserve(2**60)
    failed = pytest.raises(errors.CheckpointError, match="step 3 could not be written")
    with failed, no_larger_files_than(2**16):
        save(host, {"small": np.ones(9), "w": np.ones((4, 2**14))})
    assert host.being_written == set()
    # The limit counts all slots, and what they are about to write.
    disk.limit_bytes = 3 * 2**20
    with opened(disk, 1) as one, opened(disk, 2) as two:
        writer = one.begin(StepId(4, "0"), NOTHING)
        writer.reserve(2**20)
        needs = r"step 4 needs 1048576 bytes.*limit 3145728.*raise the limit"
        with pytest.raises(errors.CheckpointError, match=needs):
            two.begin(StepId(4, "0"), NOTHING).reserve(2**20)
        writer.abandon()
        two.begin(StepId(4, "0"), NOTHING).reserve(2**20)
    assert disk.all_saves() == [(0, (2, "0")), (2, (4, "0"))]


def test_a_machine_gets_one_id_however_many_processes_ask(disk):
    with futures.ThreadPoolExecutor(16) as threads:
        ids = set(threads.map(machine.machine_id, [disk.root] * 16))
    assert ids == {disk.machine}
    assert re.fullmatch("[0-9a-f]{16}", disk.machine)
    assert os.listdir(disk.root) == ["machine"]
    assert stat.S_IMODE(os.stat(disk.root).st_mode) == 0o700


def test_a_ram_disk_that_is_not_in_memory_is_a_warning(tmp_path, caplog):
    stored = choices.Persistent(tmp_path / "steps", every=1)
    with shared_memory.directory("choices") as memory:
        for path in (memory, tmp_path / "ram"):
            frontend.Checkpointer([choices.Local(path), stored]).close()
    # What storage alone needs for a while is no RAM disk.
    frontend.Checkpointer([stored]).close()
    warned = [each for each in caplog.messages if "not in memory" in each]
    disk = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True)
    assert len(warned) == (disk.strip() not in ("tmpfs", "ramfs"))
    for warning in warned:
        assert warning.startswith(f"{tmp_path / 'ram'} is on a file system of type")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_a_directory_that_belongs_to_another_user_is_refused(disk):
    why = r"belongs to user 65534.* set"
    os.mkdir(disk.root)
    for names in ([], [machine.FILE]):
        os.chown(disk.root, 65534, 65534)
        with pytest.raises(errors.CheckpointError, match=why):
            machine.machine_id(disk.root)
        assert os.listdir(disk.root) == names
        os.chown(disk.root, 0, 0)
        machine.machine_id(disk.root)


def test_leftovers_and_old_steps_of_dead_processes_alone_are_removed(disk, host):
    later = checked_blobs.to_bytes({}, [], version=77)
    for step, content in ((1, later), (2, later[:-1])):
        save(host, step=step)
        pathlib.Path(disk.manifest_path(0, StepId(step, "0"))).write_bytes(content)
    # A slot has one live process.
    with pytest.raises(errors.RunError, match="another live"):
        opened(disk, 0)
    with opened(disk, 1) as alive:
        save(alive, step=3)
        alive.begin(StepId(4, "0"), NOTHING).reserve(9)
        with opened(disk, 2) as dead:
            dead.begin(StepId(4, "0"), NOTHING).reserve(9)
            for step in (2, 3):
                save(dead, step=step)
        slots = [pathlib.Path(disk.host_directory(slot)) for slot in (0, 2)]
        extra = [
            slots[1] / "3-0" / "w" / "c" / "0.__lock",
            slots[0] / ram_disk.RESTORED / "data" / "0.json",
            *(slot / ram_disk.SPARE / "3" for slot in slots),
            slots[1] / ram_disk.STAGED / "3-1" / "data" / "0.json",
        ]
        for path in extra:
            storage.write_atomic(path, b"x")
        host.clean()
        assert not any(path.exists() for path in extra)
        # What a later version has written stays.
        kept = [(0, (1, "0")), (1, (3, "0")), (1, (4, "0")), (2, (3, "0"))]
        assert disk.all_saves() == [*kept[:3], (2, (2, "0")), kept[3]]
        for is_any in (True, False):
            assert host.remove_idle(lambda each: each.step == 2) == is_any
        assert disk.all_saves() == kept


def spare(host):
    directory = pathlib.Path(host.disk.host_directory(0), ram_disk.SPARE)
    return [each.name for each in directory.glob("*")]


def test_a_step_takes_files_of_removed_ones_but_no_repaired_file(disk, host):
    inodes = []
    for step in range(1, 7):
        state = large_state(step)
        saved = save(host, state, step)
        check(disk, state, step)
        if step > 1:
            host.remove(StepId(step - 1, "0"))
        directory = disk.step_directory(0, StepId(step, "0"))
        inodes.append(os.stat(directory / "large" / "c" / "0").st_ino)
        if step == 4:
            # Damaged metadata does not prevent a repair.
            (directory / "large" / "zarr.json").write_bytes(b"{")
            leaf, files = saved.contents.leaves[0], ram_disk.StepFiles(directory)
            content = stored_part.content(leaf, state["large"])
            files.repair(leaf, boxes.whole(leaf.shape), content)
    assert inodes[2:5] == [*inodes[:2], inodes[0]]
    # They take no more than the last step.
    for step in (7, 8):
        save(host, large_state(step), step)
    for step in (6, 7, 8):
        host.remove(StepId(step, "0"))
    assert host.files.spare_bytes == LARGE_BYTES
    # They make room under the limit of a machine.
    disk.limit_bytes = LARGE_BYTES + LEAST_BYTES
    state = large_state(8, large=LARGE + 8)
    save(host, state, 8)
    check(disk, state, 8)
    assert host.files.spare_bytes == 0


def test_files_that_were_made_ahead_are_those_of_the_next_step(disk, host):
    sizes = [each.nbytes for each in large_state(2).values()]
    # What is there is not made again.
    for _ in range(2):
        host.prepare(sizes)
    save(host, large_state(2), 2)
    check(disk, large_state(2), 2)
    assert host.files.num_made == 2
    # So it is for a state that was restored; what cannot be saved is told later.
    state = {**large_state(3), "w": jnp.zeros((512, 1024))}
    capture.prepare({**state, "text": np.array(["a"])}, host, pinned_bytes=LARGE)
    save(host, state)
    assert host.files.num_made == 5
    # None is made without room.
    disk.limit_bytes = 2 * LARGE
    host.prepare([LARGE, LARGE])
    host.files.close()
    assert host.files.num_made == 5
    assert spare(host) == []


def test_a_capture_that_fails_or_is_abandoned_leaves_no_file(host, tmp_path):
    state, memory = large_state(1), capture.Memory(host.files)
    with no_larger_files_than(LEAST_BYTES):
        captured = capture.capture(state, memory)
    # What finds no room is captured in other memory.
    assert captured.file_bytes == 0
    for (name, _), values in captured.values().items():
        assert values.tobytes() == state[name].tobytes()
    captured.release()
    leaf = manifest.Leaf(path="w", shape=(LARGE,), dtype="uint8")
    too_long = (boxes.whole(leaf.shape), np.zeros(2 * LARGE, np.uint8))
    shards = capture.Shards(
        leaf=leaf, shard_shape=leaf.shape, boxes=(too_long,), kept=False
    )
    with pytest.raises(TypeError, match="buffer is too small"):
        capture.capture({**state, "w": shards}, memory)
    captured = capture.capture(state, memory)
    # Large chunks are copied straight into the files of their step.
    assert captured.file_bytes == LARGE_BYTES
    assert len(spare(host)) == 2
    whole = manifest.Contents(leaves=captured.leaves, components=())
    writer = host.begin(StepId(1, "0"), whole)
    writer.write(captured)
    captured.release()
    writer.abandon()
    assert spare(host) == []
    assert str(tmp_path) not in pathlib.Path("/proc/self/maps").read_text()
