"""The persistent tier: uploaded by hosts, committed at once, read by manifests."""

import dataclasses
import datetime
import errno
import functools
import pathlib
from concurrent import futures
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, clock, errors, storage
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.persistent import (
    leases,
    ocdbt,
    persistent_root,
    persistent_tier,
    retries,
    upload,
)
from tests.checkpoint.host.test_capture import random_bits
from tests.tiers import uploaded
from tests.tiers.tiered_steps import steps_of

LINE = Line(save="9", parents=())
WORLD = uploaded.hosts(3)
# The shapes of chunks, by those of arrays.
SHAPES = {(6,): (3,), (4, 6): (2, 3), (): ()}


@pytest.fixture(params=["renamed", "in place"])
def root(request, tmp_path):
    return persistent_root.PersistentRoot(
        path=storage.absolute(tmp_path / "steps"), in_place=request.param == "in place"
    )


@pytest.fixture
def tier(root):
    """The steps as they are when it is called."""
    return lambda run=uploaded.RUN: persistent_tier.PersistentTier(root, run=run)


def put(root, step=5, *, save="0"):
    """Uploads and commits a step."""
    saved = uploaded.saved_step(step, save=save)
    uploaded.write_all(root, saved, WORLD)
    uploaded.commit_all(root, saved)


def tree(directory):
    files = filter(pathlib.Path.is_file, pathlib.Path(directory).rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_a_step_is_committed_found_with_its_metrics_and_removed(root, tier):
    put(root)
    before = tier()
    assert steps_of(before) == [5]
    saved = uploaded.saved_step(6)
    ours = upload.Upload(root, saved, WORLD[0])
    ours.begin()
    put_item = functools.partial(uploaded.put, ours, saved)
    with futures.ThreadPoolExecutor(16) as threads:
        list(threads.map(put_item, uploaded.items(saved)))
    ours.finish()
    for _ in range(2):
        # A commit may be repeated.
        uploaded.commit_all(root, saved)
        uploaded.read(tier(), saved)
    with pytest.raises(errors.CheckpointError, match="nothing is left to upload"):
        ours.begin()
    # A search has the steps of when it began.
    assert (steps_of(before), steps_of(tier())) == ([5], [5, 6])
    metrics = pathlib.Path(root.final(6), "metrics", "metrics")
    # What cannot be read is asked again: until then retention keeps the step.
    for text, known in (("", None), ('{"loss": 1.5}', True)):
        metrics.write_text(text)
        _, held = tier().held(LINE)
        assert (held.step, held.complete) == (6, known)
    assert held.metrics == {"loss": 1.5}
    assert held.time == datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
    # Another run is offered nothing, and its retention never touches it.
    other = tier("another")
    copies, problems = other.offers(5)
    assert (copies, len(problems), other.held(LINE)) == ([], 3, [])
    root.remove(root.final(5))
    assert not before.offers(5).held
    assert not root.leftovers()
    # A removal that is killed leaves a leftover.
    root.uncommit(root.final(6))
    assert steps_of(tier()) == []
    (leftover,) = root.leftovers()
    assert leftover.step == 6


def test_half_a_step_or_one_of_two_minds_is_refused_and_repeated(root, tier):
    saved = uploaded.saved_step()
    items = uploaded.items(saved)

    def refuse(why):
        with pytest.raises(errors.CheckpointError, match=why):
            uploaded.commit_all(root, saved)
        assert steps_of(tier()) == []

    refuse("no host has uploaded")
    # With wrong values, and a file that is of no use any more.
    uploaded.write(root, saved, WORLD[0], items[1:-1], seed=1)
    lacks = "lacks parts of 2 of 5 arrays and files"
    refuse(rf"{lacks}: .state/params/b\[0:6\].*data/shards-00002.json")
    stray = root.unfinished(StepId(5, "0"))
    storage.write_atomic(stray / "data" / "shards-00007.json", b"stray")
    uploaded.write_all(root, saved, WORLD[1:])
    refuse("different values")
    # What differed is not there any more.
    uploaded.write_all(root, saved, WORLD[1:])
    uploaded.commit_all(root, saved)
    uploaded.read(tier(), saved)
    names = set(tree(root.final(5)))
    assert not names & {"manifest-m0.0", "data/shards-00007.json"}
    assert not any(ocdbt.store_name("m0.0", "0") in name for name in names)


def test_a_killed_upload_does_not_send_again_what_is_there(root, tier, monkeypatch):
    monkeypatch.setattr(upload, "_PROGRESS_SECS", 0.0)
    monkeypatch.setattr(upload, "_PROGRESS_SHARE", 0)
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    # Chunks of another save are of no use.
    other = uploaded.saved_step(save="1")
    uploaded.write(root, other, uploaded.hosts(1)[0], items, finish=False)
    write = mock.Mock(wraps=ocdbt.write)
    monkeypatch.setattr(ocdbt, "write", write)
    # Three worlds of other hosts, of which the first two are killed after 0.8 of their
    # work: the third finishes it.
    for count, is_killed in ((3, True), (2, True), (4, False)):
        for number, host in enumerate(uploaded.hosts(count)):
            share = items[number::count]
            end = len(share) * 4 // 5 if is_killed else None
            uploaded.write(root, saved, host, share[:end], finish=not is_killed)
        # An index that was cut short, longer than any that follows.
        for store in root.unfinished(saved.step_id).glob("*/ocdbt.process_*"):
            (store / "manifest.ocdbt.__lock").write_bytes(bytes(10**5))
    num_sent = sum(len(call.args[1]) for call in write.mock_calls)
    assert num_sent == len(items) - len(uploaded.COMPONENT)
    uploaded.commit_all(root, saved)
    uploaded.read(tier(), saved)


def test_a_committed_step_is_replaced_by_a_newer_save_alone_and_set_aside(root, tier):
    storage.write_atomic(root.final(7) / persistent_root.COMMIT_FILE, b"done")
    with pytest.raises(errors.CheckpointError, match="saved by stock Orbax"):
        upload.Upload(root, uploaded.saved_step(7), WORLD[0]).begin()
    storage.remove(root.final(7))
    put(root, save="1")
    before = tree(root.final(5))
    older, later = (uploaded.saved_step(save=save) for save in "02")
    ours = upload.Upload(root, older, WORLD[0])
    for act in (ours.begin, lambda: uploaded.commit_all(root, older)):
        with pytest.raises(errors.CheckpointError, match=r"its save is 1.*remove it"):
            act()

    def set_aside():
        of_later = Line(save="2", parents=())
        leases.arrange(root, of_later, run=uploaded.RUN, step=5, watch={})

    if root.in_place:
        with pytest.raises(errors.CheckpointError, match="its save is 1"):
            upload.Upload(root, later, WORLD[0]).begin()
        assert tree(root.final(5)) == before
        set_aside()
    uploaded.write_all(root, later, WORLD, seed=3)
    assert root.is_committed(5) != root.in_place
    uploaded.commit_all(root, later, make_way=set_aside)
    assert tree(root.aside(StepId(5, "1"))) == before
    assert tier().known_saves() == [(5, "1"), (5, "2")]
    root.remove(root.aside(StepId(5, "1")))
    uploaded.read(tier(), later, seed=3)
    assert not root.leftovers()


def test_what_cannot_be_read_is_said(root, tier):
    put(root)
    (saved, reader), *_ = tier().offers(5).held
    chunk, file = saved.contents.leaves[1], saved.contents.leaves[-1]
    box = boxes.whole(chunk.chunk)
    for leaf, path, num_bytes, message in (
        (file, file.path, 8, "ends after 3 bytes, but should be 8 bytes long"),
        (file, "data/none.json", 8, "is missing"),
        (chunk, chunk.path, 99, "ends after 28 bytes"),
        (chunk, "state/params/none", 8, "is missing"),
    ):
        there, into = dataclasses.replace(leaf, path=path), bytearray(num_bytes)
        with pytest.raises(source.ReadError, match=message):
            reader.read_into(there, box, memoryview(into))
    storage.remove(root.path)
    storage.write_atomic(root.path, b"a file")
    with pytest.raises(errors.CheckpointError, match="cannot be read or listed"):
        steps_of(tier())


def test_failing_storage_is_waited_for_unless_it_refuses(monkeypatch, caplog):
    slept = []
    # Waits take no time.
    monkeypatch.setattr(clock, "sleep", slept.append)

    def call(problem, times=1):
        act = mock.Mock(side_effect=[*[problem] * times, "done"])
        return retries.call("writing /a", act)

    away = ValueError("UNAVAILABLE: the store is away")
    for problem in (OSError(errno.EIO, "I/O error"), TimeoutError("timed out"), away):
        slept.clear()
        caplog.clear()
        assert call(problem, 7) == "done"
        assert 0.25 <= slept[0] <= 0.5 <= slept[1] <= 1 <= slept[2] <= 2
        assert 15 <= slept[6] <= 30
        assert len(caplog.messages) == len(slept) == 7
        assert "writing /a failed, attempt 1 of 8" in caplog.messages[0]
        # In the end waiting is given up.
        given_up = r"writing /a failed, attempt 8 of 8.*again"
        with pytest.raises(errors.CheckpointError, match=given_up):
            call(problem, 8)
    slept.clear()
    for problem in (
        PermissionError(errno.EACCES, "no"),
        OSError(errno.EROFS, "read-only"),
        OSError(errno.ENOSPC, "no space left"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device"),
        ValueError("PERMISSION_DENIED: no"),
    ):
        with pytest.raises(errors.CheckpointError, match="with its next backup"):
            call(problem)
    # What storage did not say is an error of the program.
    with pytest.raises(ValueError, match="a bug"):
        call(ValueError("a bug"))
    assert not slept


def content(context, spec):
    store = ts.KvStore.open(spec, context=context).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def test_a_path_that_tensorstore_refuses_or_changes_is_refused(tmp_path):
    refused = {"a\\b", "a\\", "x.__lock", "a\udcffb"}
    not_in_urls = {f"a{mark}b" for mark in [*"?#%|\t\x7f\udcff", "%20", "%2F"]}
    for name in refused | not_in_urls | {"..a", "b.", " ", "~", "*:", "é"}:
        place, url = tmp_path / name / "steps", f"gs://bucket/{name}/steps"
        if name in refused:
            with pytest.raises(errors.ConfigError, match="which TensorStore"):
                persistent_root.PersistentRoot.from_path(place)
        else:
            path = persistent_root.PersistentRoot.from_path(place).path
            ocdbt.open_store(path, ocdbt.new_context()).write("key", b"x").result()
            assert "manifest.ocdbt" in tree(place)
        if name in not_in_urls:
            with pytest.raises(errors.ConfigError, match="which TensorStore"):
                ocdbt.base_spec(url)
        else:
            assert ts.KvStore.Spec(ocdbt.base_spec(url)).path == f"{name}/steps/"


@pytest.mark.parametrize("small_bytes", [ocdbt._SMALL_BYTES, -1])
def test_what_is_stored_is_what_tensorstore_stores(small_bytes, tmp_path, monkeypatch):
    # Small chunks are encoded here, large ones by TensorStore.
    monkeypatch.setattr(ocdbt, "_SMALL_BYTES", small_bytes)
    arrays = [
        random_bits(dtype, int(np.prod(shape))).reshape(shape)
        for dtype in sorted(capture.STORABLE)
        for shape in SHAPES
    ]
    # Chunks that do not lie in one piece are stored in their order.
    arrays.append(np.arange(24, dtype=np.float32).reshape(6, 4).T)
    ours, theirs, chunks = ocdbt.new_context(), ts.Context(), []
    for number, values in enumerate(arrays):
        shape, dtype = values.shape, values.dtype.name
        path, chunk = f"state/{number}", SHAPES[values.shape]
        leaf = manifest.Leaf(path=path, shape=shape, dtype=dtype, chunk=chunk)
        for box in layout.cut(boxes.whole(shape), chunk):
            of_box = values[tuple(map(slice, box.start, box.stop))]
            chunks.append(ocdbt.Chunk(leaf=leaf, box=box, values=of_box))
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": f"{number}/"},
            "metadata": layout.array_metadata(leaf),
            "store_data_equal_to_fill_value": True,
        }
        ts.open(spec, create=True, context=theirs).result().write(values).result()
    ocdbt.write(tmp_path, chunks, ours)
    expected = content(theirs, {"driver": "memory"})
    assert content(ours, ocdbt.store_spec(tmp_path)) == expected
    assert len(expected) == len(chunks) + len(arrays)
