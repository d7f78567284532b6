import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, digest, errors, storage
from elastic_ckpt.steps import layout, line, manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.captured import CapturedLeaf
from elastic_ckpt.tiers.ram import local, ram_disk, step_writer
from tests.checkpoint.host.test_capture import random_bits

ROOT = pathlib.Path(__file__).parents[2]
RUN = "run-7"


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
    contents = manifest.Contents(leaves=captured.leaves, components={})
    if slot_of is not None:
        captured.parts = tuple(
            CapturedLeaf(
                leaf=part.leaf,
                shard_shape=part.shard_shape,
                boxes=tuple(b for n, b in enumerate(part.boxes) if slot_of(n)),
            )
            for part in captured.parts
        )
    writer = host.begin(StepId(step, "0"), contents, num_bytes=captured.num_bytes)
    writer.write(captured)
    return writer.commit()


def state(step):
    """The state at a step: three leaves."""
    return {
        "params/b": np.full(3, step, np.int8),
        "params/w": np.arange(24, dtype=np.float32).reshape(4, 6) * step,
        "step": step,
    }


def cursors(step):
    """The file of the component `data`."""
    return f'{{"row": {step}}}'.encode()


def save_all(host, step, *, save="0"):
    """Saves the state, and the component."""
    captured = capture.capture(state(step), capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components={"data": 1})
    writer = host.begin(StepId(step, save), contents, num_bytes=captured.num_bytes)
    writer.write(captured)
    storage.write_atomic(writer.directory / "data" / "0.json", cursors(step))
    (file,) = step_writer.written_files(writer.directory, ["data"])
    files = [manifest.ComponentFile(component="data", parts=(0, 1), **file._asdict())]
    return writer.commit(files)


def take_copies(host, step):
    """Adds copies of the leaf `params/w`, a row each, as from a peer."""
    captured = capture.capture(state(step), capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components={"data": 1})
    writer = host.copy_writer(StepId(step, "0"), contents, num_bytes=1000)
    for row in range(4):
        values = state(step)["params/w"][row : row + 1]
        fragment = manifest.Fragment(
            leaf=1,
            box=boxes.Box(start=(row, 0), stop=(row + 1, 6)),
            digest=digest.values_digest(values),
            file="wherever",
            offset=0,
            stored_bytes=values.nbytes,
        )
        content = values.reshape(-1).view(np.uint8)
        writer.put(fragment, functools.partial(_copy, content))
    return writer.commit()


def _copy(content, into):
    np.copyto(into, content)


def offered(disk, step):
    offered = disk.offers(step)
    assert not offered.problems
    return offered.sources


def fragments(saved):
    every = range(len(saved.fragments))
    return [saved.fragments.row(n, contents=saved.contents) for n in every]


def read(files, saved, fragment):
    """The values of a fragment, as a restore reads them, and whether they are right."""
    leaf = saved.contents.leaves[fragment.leaf]
    values = np.empty(fragment.box.shape, leaf.dtype)
    into = memoryview(values.reshape(-1).view(np.uint8))
    files.read_into(fragment.file, fragment.offset, into)
    return values, digest.values_digest(values) == fragment.digest


def restored(disk, step):
    """Every leaf of a step, from all slots together, each element checked."""
    whole, filled = {}, {}
    for offer, files in offered(disk, step).items():
        saved = offer.manifest
        for fragment in fragments(saved):
            leaf = saved.contents.leaves[fragment.leaf]
            values, right = read(files, saved, fragment)
            assert right
            place = boxes.relative(fragment.box, boxes.whole(leaf.shape))
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


def test_every_storable_dtype_is_read_bit_by_bit_by_us_and_by_tensorstore(disk, host):
    values = {name: random_bits(name, 48) for name in sorted(capture.STORABLE)}
    save(host, values)
    tree = restored(disk, 3)
    directory = disk.step_directory(0, StepId(3, "0"))
    for name, each in values.items():
        assert tree[name].tobytes() == each.tobytes()
        assert np.asarray(open_array(directory, name)).tobytes() == each.tobytes()


def test_shards_of_two_hosts_are_cut_into_chunks_that_tensorstore_joins(
    disk, host, tmp_path, monkeypatch
):
    monkeypatch.setattr(layout.chunk_shape, "__kwdefaults__", {"chunk_bytes": 100})
    values = random_bits("bfloat16", 1024).reshape(32, 32)
    array = {"params/w": sharded(values, "a", "b")}
    saved = save(host, array, slot_of=lambda n: n % 2 == 0)
    assert len(saved.fragments) > 4
    assert max(saved.fragments.stored_bytes) <= 100 + layout.CHECKSUM_BYTES
    # The directories of two hosts together are one array.
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


def test_what_is_held_has_the_time_and_metrics_of_its_save(disk, host):
    captured = capture.capture({"w": np.ones(8)}, capture.Memory())
    contents = manifest.Contents(leaves=captured.leaves, components={})
    writer = host.begin(StepId(3, "0"), contents, num_bytes=64)
    writer.write(captured)
    known = dataclasses.replace(contents, time_ms=1500, metrics='{"loss":NaN}')
    writer.commit(contents=known)
    save_all(host, 4)
    disk.manifest_path(0, StepId(4, "0")).write_text("{}")
    first, spoilt = host.retained()
    assert (first.step, first.time.timestamp(), first.complete) == (3, 1.5, True)
    assert np.isnan(first.metrics["loss"])
    assert (spoilt.step, spoilt.metrics, spoilt.complete) == (4, None, False)


def test_a_committed_step_is_not_saved_over(host):
    save_all(host, 3)
    with pytest.raises(errors.CheckpointError, match=r"step 3, save '0', is in .*/3-0"):
        save_all(host, 3)
    assert host.in_flight == set()


def test_bad_files_are_put_right(disk, host):
    saved = save_all(host, 3)
    ((_, files),) = offered(disk, 3).items()
    directory = pathlib.Path(disk.step_directory(0, StepId(3, "0")))
    for fragment in fragments(saved):
        values, right = read(files, saved, fragment)
        assert right
        path = directory / fragment.file
        sound = path.read_bytes()
        path.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
        assert not read(files, saved, fragment)[1]
        # Damaged metadata does not prevent the repair.
        metadata = directory / saved.contents.leaves[fragment.leaf].path / "zarr.json"
        metadata.write_bytes(b"{")
        host.put_right(saved, fragment, values)
        assert path.read_bytes() == sound
    (file,) = saved.component_files
    (directory / file.path).unlink()
    host.put_right_file(saved, file, cursors(3))
    assert (directory / file.path).read_bytes() == cursors(3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 90), "ends after 90 bytes, and 96"),
        (lambda path: os.truncate(path, 0), "ends after 0 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "behind a link"),
        (
            lambda path: (
                path.parent.rename(path.parents[2] / "outside"),
                path.parent.symlink_to(path.parents[2] / "outside"),
            ),
            "behind a link",
        ),
    ],
)
def test_a_file_that_cannot_give_the_bytes_is_a_read_error(disk, host, spoil, message):
    save(host, {"w": np.arange(12.0)})
    ((offer, files),) = offered(disk, 3).items()
    (fragment,) = fragments(offer.manifest)
    spoil(pathlib.Path(disk.step_directory(0, StepId(3, "0")) / fragment.file))
    with pytest.raises(source.ReadError, match=message):
        read(files, offer.manifest, fragment)


def test_a_spoilt_manifest_is_a_sentence_and_its_neighbours_are_offered(disk, host):
    save_all(host, 3, save="0")
    save_all(host, 3, save="1")
    path = pathlib.Path(disk.manifest_path(0, StepId(3, "0")))
    path.write_bytes(path.read_bytes()[:-9])
    offered = disk.offers(3)
    assert [offer.manifest.save for offer in offered.sources] == ["1"]
    (problem,) = offered.problems
    assert "is cut short" in problem
    assert str(path) in problem


def test_a_manifest_of_another_step_or_save_is_not_taken(disk, host):
    save_all(host, 3, save="0")
    save_all(host, 3, save="1")
    save_all(host, 4)
    name = disk.manifest_path(0, StepId(3, "0")).name
    for other, message in (("4-0", "step 4"), ("3-1", "save '1'")):
        shutil.copy(
            disk.host_directory(0) / other / name, disk.manifest_path(0, StepId(3, "0"))
        )
        (problem,) = disk.offers(3).problems
        assert message in problem


def test_the_limit_counts_all_slots_and_what_they_are_about_to_write(disk, host):
    save(host, {"w": np.ones(2**17)})
    limited = ram_disk.RamDisk(disk.root, run=RUN, limit_bytes=3 * 2**20)
    contents = manifest.Contents(leaves=(), components={})
    with (
        contextlib.closing(
            local.LocalHost(limited, slot=1, domains={}, number=1)
        ) as one,
        contextlib.closing(
            local.LocalHost(limited, slot=2, domains={}, number=2)
        ) as two,
    ):
        writer = one.begin(StepId(4, "0"), contents, num_bytes=2**20)
        with pytest.raises(errors.CheckpointError) as refused:
            two.begin(StepId(4, "0"), contents, num_bytes=2**20)
        message = str(refused.value)
        assert "step 4 needs 1048576 bytes" in message
        assert "limit 3145728" in message
        assert "raise the limit" in message
        assert two.in_flight == set()
        assert limited.saves(2) == []
        writer.abandon()
        two.begin(StepId(4, "0"), contents, num_bytes=2**20).abandon()


def test_what_the_file_system_cannot_take_is_refused_at_once(disk, host):
    contents = manifest.Contents(leaves=(), components={})
    with pytest.raises(errors.CheckpointError, match="without a limit"):
        host.begin(StepId(3, "0"), contents, num_bytes=2**60)
    # Room that is looked for later is refused alike.
    writer = host.begin(StepId(3, "0"), contents, num_bytes=None)
    assert host.in_flight == {(3, "0")}
    with pytest.raises(errors.CheckpointError, match="without a limit"):
        host.reserve(writer, 2**60)
    assert host.in_flight == set()
    assert disk.steps() == []


def test_a_write_that_fails_halfway_is_a_clear_error_and_leaves_nothing(disk, host):
    save_all(host, 2)
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
    assert disk.steps() == [2]
    assert host.in_flight == set()


def test_copies_take_the_place_of_what_a_spoilt_manifest_listed(disk, host):
    save_all(host, 3)
    pathlib.Path(disk.manifest_path(0, StepId(3, "0"))).write_bytes(b"{}")
    held = take_copies(host, 3)
    assert len(held.fragments) == 4
    ((offer, _),) = offered(disk, 3).items()
    assert fragments(offer.manifest) == fragments(held)
    assert not host.clean()


def test_what_a_restore_unpacked_is_a_leftover(disk, host):
    unpacked = pathlib.Path(disk.host_directory(0), ram_disk.RESTORED)
    storage.write_atomic(unpacked / "data" / "0.json", b"{}")
    assert host.clean() == [str(unpacked)]
    assert not unpacked.exists()


def test_a_slot_has_one_live_process(disk, host):
    with pytest.raises(errors.RunError, match="another live"):
        local.LocalHost(disk, slot=host.disk.slots()[0], domains={}, number=1)
    host.close()
    local.LocalHost(disk, slot=0, domains={}, number=1).close()


def test_cleaning_leaves_what_is_committed_or_being_written(disk, host):
    save_all(host, 3)
    contents = manifest.Contents(leaves=(), components={})
    writer = host.begin(StepId(4, "0"), contents, num_bytes=9)
    with contextlib.closing(
        local.LocalHost(disk, slot=1, domains={}, number=1)
    ) as alive:
        alive.begin(StepId(4, "0"), contents, num_bytes=9)
        dead = local.LocalHost(disk, slot=2, domains={}, number=2)
        dead.begin(StepId(4, "0"), contents, num_bytes=9)
        save_all(dead, 3)
        dead.close()
        extra = (
            disk.step_directory(2, StepId(3, "0")) / "params" / "b" / "c" / "0.__lock"
        )
        storage.write_atomic(extra, b"x")
        removed = host.clean()
        assert removed == [str(extra), str(disk.step_directory(2, StepId(4, "0")))]
        assert disk.saves(1) == [(4, "0")]
    assert disk.saves(0) == [(3, "0"), (4, "0")]
    assert len(offered(disk, 3)) == 2
    writer.abandon()


def test_a_spoilt_manifest_is_cleaned_but_not_that_of_another_version(disk, host):
    for step in (3, 4):
        save_all(host, step)
        path = pathlib.Path(disk.manifest_path(0, StepId(step, "0")))
        content = json.loads(path.read_bytes())
        content["version" if step == 4 else "step"] = 77
        path.write_text(json.dumps(content))
    assert host.clean() == [str(disk.step_directory(0, StepId(3, "0")))]
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
        of_line = line.Line(save="0", parents=())
        host.remove_idle(of_line, before=4, preserved=[2])
        assert [step for step, _ in disk.saves(1)] == [2, 4]
        assert [step for step, _ in disk.saves(2)] == [1]
        assert not offered(disk, 3)
