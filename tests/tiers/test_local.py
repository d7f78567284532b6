import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import resource
import shutil
import stat
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import checked_blobs, digest, errors, storage
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import source, stored_part
from elastic_ckpt.tiers.captured import CapturedLeaf
from elastic_ckpt.tiers.ram import local, machine, ram_disk
from tests import seams, shared_memory
from tests.checkpoint.host.test_capture import random_bits
from tests.tiers import local_steps
from tests.tiers.tiered_steps import steps_of

RUN = local_steps.RUN


@pytest.fixture
def disk(tmp_path):
    return ram_disk.RamDisk(tmp_path / "disk", run=RUN)


@pytest.fixture
def host(disk):
    with contextlib.closing(
        local.LocalHost(disk, slot=0, domains={"slice": "s0"}, number=0)
    ) as host:
        yield host


def save(host, state, *, step=3, slot_of=None):
    """Saves `state`; of its boxes those that `slot_of` gives to the host's slot."""
    captured = capture.capture(state, capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components=())
    if slot_of is not None:
        captured.parts = tuple(
            CapturedLeaf(
                leaf=part.leaf,
                shard_shape=part.shard_shape,
                boxes=tuple(b for n, b in enumerate(part.boxes) if slot_of(n)),
            )
            for part in captured.parts
        )
    writer = host.begin(StepId(step, "0"), contents)
    writer.reserve(captured.num_bytes)
    writer.write(captured)
    return writer.commit()


def offered(disk, step):
    offered = disk.offers(step)
    assert not offered.problems
    return offered.copies


def read(files, leaf, box, named):
    """The values of a part, as a restore reads them, and whether they are right."""
    values = np.empty(box.shape, leaf.dtype)
    files.read_into(leaf, box, memoryview(values.reshape(-1).view(np.uint8)))
    mapped = files.mapped(leaf, box)
    assert mapped.tobytes() == values.tobytes()
    assert not mapped.flags.writeable
    return values, digest.values_digest(values) == named


def parts(saved):
    """The leaf, the box and the digest of each."""
    return [(saved.contents.leaves[n], box, named) for n, box, named in saved.rows()]


def restored(disk, step):
    """Every leaf of a step, from all slots together, each element checked."""
    whole, filled = {}, {}
    for saved, files in offered(disk, step):
        for leaf, box, named in parts(saved):
            values, right = read(files, leaf, box, named)
            assert right
            place = tuple(map(slice, box.start, box.stop))
            whole.setdefault(leaf.path, np.zeros(leaf.shape, leaf.dtype))[place] = (
                values
            )
            filled.setdefault(leaf.path, np.zeros(leaf.shape, bool))[place] = True
    assert all(each.all() for each in filled.values())
    return whole


def sharded(values, *spec, shape=(2, 4)):
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def open_array(directory, path):
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory}/{path}"},
    }
    return ts.open(spec, open=True, read=True).result().read().result()


def test_a_step_is_read_as_it_was_saved_under_any_sharding(disk, host):
    values = random_bits("float32", 512).reshape(16, 32)
    specs = [("a", "b"), ("b", None), (None, ("a", "b")), ()]
    state = {f"w{n}": sharded(values, *spec) for n, spec in enumerate(specs)}
    save(host, {**state, "zero": jnp.zeros((4, 4)), "n": np.int32(-1)})
    tree = restored(disk, 3)
    for name in state:
        assert tree[name].tobytes() == values.tobytes()
    assert tree["zero"].tobytes() == bytes(64)
    assert tree["n"] == -1


def test_every_storable_dtype_is_read_bit_by_bit_by_us_and_by_tensorstore(disk, host):
    values = {name: random_bits(name, 48) for name in sorted(capture.STORABLE)}
    save(host, values)
    tree = restored(disk, 3)
    directory = disk.step_directory(0, StepId(3, "0"))
    for name, each in values.items():
        assert tree[name].tobytes() == each.tobytes()
        assert np.asarray(open_array(directory, name)).tobytes() == each.tobytes()


def test_large_shards_are_cut_into_chunks_that_tensorstore_joins(
    disk, host, monkeypatch
):
    monkeypatch.setattr(layout.chunk_shape, "__kwdefaults__", {"chunk_bytes": 100})
    values = random_bits("bfloat16", 1024).reshape(32, 32)
    saved = save(host, {"w": sharded(values, "a", "b")})
    assert len(parts(saved)) > 8
    directory = disk.step_directory(0, StepId(3, "0"))
    for leaf, box, _ in parts(saved):
        assert leaf.num_bytes(box) <= 100
        file = directory / layout.part_file(leaf, box)
        behind = 0 if leaf.is_file else layout.CHECKSUM_BYTES
        assert file.stat().length == leaf.num_bytes(box) + behind
    assert restored(disk, 3)["w"].tobytes() == values.tobytes()
    joined = open_array(disk.step_directory(0, StepId(3, "0")), "w")
    assert joined.tobytes() == values.tobytes()


def test_the_directories_of_two_hosts_together_are_one_array(disk, host, tmp_path):
    values = random_bits("float32", 512).reshape(16, 32)
    array = {"params/w": sharded(values, "a", "b")}
    save(host, array, slot_of=lambda n: n % 2 == 0)
    with contextlib.closing(
        local.LocalHost(disk, slot=1, domains={}, number=1)
    ) as other:
        save(other, array, slot_of=lambda n: n % 2 == 1)
    for slot in (0, 1):
        directory = disk.step_directory(slot, StepId(3, "0"))
        shutil.copytree(directory, tmp_path / "union", dirs_exist_ok=True)
    joined = open_array(tmp_path / "union", "params/w")
    assert joined.tobytes() == values.tobytes()
    assert restored(disk, 3)["params/w"].tobytes() == values.tobytes()


def test_saves_of_a_step_are_offered_and_held_apart(disk, host):
    first = local_steps.save(host, 3, save="0")
    second = local_steps.save(host, 3, save="1")
    saves = [each.step_id for each, _ in offered(disk, 3)]
    assert sorted(saves) == [first.step_id, second.step_id]
    assert host.held() == [(3, "0"), (3, "1")]
    assert steps_of(disk) == [3]
    host.remove(StepId(3, "0"))
    assert host.held() == [(3, "1")]


def unreadable(path):
    raise OSError(errno.EIO, "Input/output error", path)


def test_what_is_held_has_the_time_and_metrics_of_its_save(disk, host):
    captured = capture.capture({"w": np.ones(8)}, capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components=())
    writer = host.begin(StepId(3, "0"), contents)
    writer.write(captured)
    known = dataclasses.replace(contents, time_ms=1500, metrics='{"loss":NaN}')
    writer.commit(contents=known)
    local_steps.save(host, 4)
    disk.manifest_path(0, StepId(4, "0")).write_text("{}")
    first, spoilt = host.retained()
    assert (first.step, first.time.timestamp(), first.complete) == (3, 1.5, True)
    assert np.isnan(first.metrics["loss"])
    assert (spoilt.step, spoilt.metrics, spoilt.complete) == (4, None, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "read_bytes", unreadable)
        assert [each.complete for each in host.retained()] == [None, None]


def test_a_committed_step_is_not_saved_over_and_a_leftover_of_it_is(disk, host):
    junk = disk.step_directory(0, StepId(3, "0")) / "junk" / "c"
    storage.write_atomic(junk / "0", b"of a dead process")
    local_steps.save(host, 3)
    assert not junk.exists()
    with pytest.raises(errors.CheckpointError, match=r"step 3, save '0', is in .*/3-0"):
        local_steps.save(host, 3)
    assert host.being_written == set()


def test_a_manifest_goes_before_the_files_that_it_names(disk, host):
    local_steps.save(host, 3)
    removed = []
    with seams.watched(lambda change, path: removed.append((change, path))):
        host.remove(StepId(3, "0"))
    manifest_path = disk.manifest_path(host.slot, StepId(3, "0"))
    first = next(path for change, path in removed if change == "remove")
    assert first == os.fspath(manifest_path)


def test_any_flipped_bit_of_a_chunk_is_found_and_put_right(disk, host):
    values = random_bits("float32", 6).reshape(3, 2)
    save(host, {"w": values})
    ((saved, files),) = offered(disk, 3)
    (part,) = parts(saved)
    file = layout.part_file(*part[:2])
    path = pathlib.Path(disk.step_directory(0, StepId(3, "0")) / file)
    sound = path.read_bytes()
    for bit in range(8 * values.nbytes):
        spoilt = bytearray(sound)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        assert not read(files, *part)[1]
    # Damaged metadata does not prevent the repair.
    (path.parents[2] / "zarr.json").write_bytes(b"{")
    files.put_right(*part[:2], stored_part.content(part[0], values))
    assert path.read_bytes() == sound
    assert read(files, *part)[1]


def test_a_file_that_cannot_give_the_bytes_is_a_read_error(disk, host, tmp_path):
    save(host, {"w": np.arange(12.0)})
    ((saved, files),) = offered(disk, 3)
    (part,) = parts(saved)
    file = layout.part_file(*part[:2])
    path = pathlib.Path(disk.step_directory(0, StepId(3, "0")) / file)

    def check(message):
        with pytest.raises(source.ReadError, match=message):
            read(files, *part)
        with pytest.raises(source.ReadError, match=message):
            files.mapped(*part[:2])

    for num_bytes in (90, 0):
        os.truncate(path, num_bytes)
        check(f"ends after {num_bytes} bytes, and 96")
    path.unlink()
    check("is missing")
    path.symlink_to("/dev/zero")
    check("behind a link")
    path.unlink()
    path.mkdir()
    check("no file")
    inside = pathlib.Path(disk.step_directory(0, StepId(3, "0")) / "w")
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    check("behind a link")


def test_a_manifest_that_is_spoilt_or_of_another_save_is_a_problem_beside_others(
    disk, host
):
    local_steps.save(host, 3, save="0")
    local_steps.save(host, 3, save="1")
    local_steps.save(host, 4)
    path = pathlib.Path(disk.manifest_path(0, StepId(3, "0")))
    path.write_bytes(path.read_bytes()[:-9])
    offered = disk.offers(3)
    assert [each.step_id.save for each, _ in offered.copies] == ["1"]
    (problem,) = offered.problems
    assert "was cut short" in problem
    assert str(path) in problem
    for other, message in (("4-0", "step 4"), ("3-1", "save '1'")):
        shutil.copy(disk.host_directory(0) / other / path.name, path)
        (problem,) = disk.offers(3).problems
        assert message in problem


def test_the_limit_counts_all_slots_and_what_they_are_about_to_write(disk, host):
    save(host, {"w": np.ones(2**17)})
    limited = ram_disk.RamDisk(disk.root, run=RUN, limit_bytes=3 * 2**20)
    contents = manifest.Contents(leaves=(), components=())
    with (
        contextlib.closing(
            local.LocalHost(limited, slot=1, domains={}, number=1)
        ) as one,
        contextlib.closing(
            local.LocalHost(limited, slot=2, domains={}, number=2)
        ) as two,
    ):
        writer = one.begin(StepId(4, "0"), contents)
        writer.reserve(2**20)
        with pytest.raises(errors.CheckpointError) as refused:
            two.begin(StepId(4, "0"), contents).reserve(2**20)
        message = str(refused.value)
        assert "step 4 needs 1048576 bytes" in message
        assert "limit 3145728" in message
        assert "raise the limit" in message
        assert two.being_written == set()
        assert limited.saves(2) == []
        writer.abandon()
        other = two.begin(StepId(4, "0"), contents)
        other.reserve(2**20)
        other.abandon()


def test_what_the_file_system_cannot_take_is_refused(disk, host):
    contents = manifest.Contents(leaves=(), components=())
    writer = host.begin(StepId(3, "0"), contents)
    assert host.being_written == {(3, "0")}
    with pytest.raises(errors.CheckpointError, match="without a limit"):
        writer.reserve(2**60)
    assert host.being_written == set()
    assert steps_of(disk) == []


def test_a_write_that_fails_halfway_is_a_clear_error_and_leaves_nothing(disk, host):
    local_steps.save(host, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses what is longer, as a full file system does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(
            errors.CheckpointError, match=r"step 3 could not be written"
        ):
            save(host, {"small": np.ones(9), "w": np.ones((4, 2**14))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps_of(disk) == [2]
    assert host.being_written == set()


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_host_without_a_manifest_holds_the_copies_alone(disk, host, is_spoilt):
    if is_spoilt:
        local_steps.save(host, 3)
        pathlib.Path(disk.manifest_path(0, StepId(3, "0"))).write_bytes(b"{}")
    values = local_steps.state(3)["params/w"]
    held = local_steps.copies(host, 3, values)
    assert [leaf for leaf, *_ in held.rows()] == [1, 1, 1, 1, 3]
    assert restored(disk, 3)["params/w"].tobytes() == values.tobytes()
    ((saved, _),) = offered(disk, 3)
    assert saved.rows() == held.rows()
    host.clean()
    assert restored(disk, 3)["params/w"].tobytes() == values.tobytes()


def test_a_slot_has_one_live_process(disk, host):
    with pytest.raises(errors.RunError, match="another live"):
        local.LocalHost(disk, slot=host.disk.slots()[0], domains={}, number=1)
    host.close()
    local.LocalHost(disk, slot=0, domains={}, number=1).close()


def test_a_machine_gets_one_id_however_many_processes_ask(disk):
    with futures.ThreadPoolExecutor(16) as threads:
        ids = threads.map(
            lambda _: ram_disk.RamDisk(disk.root, run=RUN).machine, range(16)
        )
    assert set(ids) == {disk.machine}
    assert re.fullmatch("[0-9a-f]{16}", disk.machine)
    assert os.listdir(disk.root) == ["machine"]
    assert stat.S_IMODE(os.stat(disk.root).st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
@pytest.mark.parametrize("is_used", [False, True])
def test_a_directory_that_belongs_to_another_user_is_refused(is_used):
    with shared_memory.directory("owner") as parent:
        root = os.path.join(parent, "run")
        os.mkdir(root)
        if is_used:
            machine.machine_id(root)
        os.chown(root, 65534, 65534)
        before = os.listdir(root)
        refused = r"belongs to user 65534.* set"
        with pytest.raises(errors.CheckpointError, match=refused):
            machine.machine_id(root)
        assert os.listdir(root) == before


def test_cleaning_leaves_what_is_committed_or_others_write(disk, host):
    local_steps.save(host, 3)
    contents = manifest.Contents(leaves=(), components=())
    with contextlib.closing(
        local.LocalHost(disk, slot=1, domains={}, number=1)
    ) as alive:
        alive.begin(StepId(4, "0"), contents).reserve(9)
        dead = local.LocalHost(disk, slot=2, domains={}, number=2)
        dead.begin(StepId(4, "0"), contents).reserve(9)
        local_steps.save(dead, 3)
        dead.close()
        extra = (
            disk.step_directory(2, StepId(3, "0")) / "params" / "b" / "c" / "0.__lock"
        )
        storage.write_atomic(extra, b"x")
        host.clean()
        assert not extra.exists()
        assert disk.saves(2) == [(3, "0")]
        assert disk.saves(1) == [(4, "0")]
    assert disk.saves(0) == [(3, "0")]
    assert len(offered(disk, 3)) == 2


def test_what_is_spoilt_or_unpacked_is_cleaned_but_no_other_version(disk, host):
    for step in (3, 4):
        local_steps.save(host, step)
        path = pathlib.Path(disk.manifest_path(0, StepId(step, "0")))
        later = checked_blobs.to_bytes({}, [], version=77)
        path.write_bytes(later if step == 4 else later[:-1])
    unpacked = pathlib.Path(disk.host_directory(0), ram_disk.RESTORED)
    storage.write_atomic(unpacked / "data" / "0.json", b"{}")
    host.clean()
    assert not unpacked.exists()
    assert disk.saves(0) == [(4, "0")]


def test_old_steps_in_slots_of_dead_processes_go_and_those_of_live_ones_stay(
    disk, host
):
    state = {"w": np.arange(6.0)}
    with contextlib.closing(
        local.LocalHost(disk, slot=1, domains={}, number=1)
    ) as gone:
        for step in (1, 2, 3, 4):
            save(gone, state, step=step)
    with contextlib.closing(
        local.LocalHost(disk, slot=2, domains={}, number=2)
    ) as alive:
        save(alive, state, step=1)
        assert host.remove_idle(lambda each: each.step in (1, 3))
        assert not host.remove_idle(lambda each: each.step in (1, 3))
        assert [step for step, _ in disk.saves(1)] == [2, 4]
        assert [step for step, _ in disk.saves(2)] == [1]
        assert not offered(disk, 3)
