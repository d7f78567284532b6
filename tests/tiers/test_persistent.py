"""The persistent tier: uploaded by hosts, committed at once, read by manifests."""

import dataclasses
import datetime
import errno
import pathlib
import random
from concurrent import futures

import numpy as np
import pytest

from elastic_ckpt.core import boxes, clock, digest, errors, storage
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
from tests import spoilt_files
from tests.tiers import uploaded
from tests.tiers.tiered_steps import steps_of

LINE = Line(save="9", parents=())
KINDS = ("renamed", "in place")


@pytest.fixture(params=KINDS)
def root(request, tmp_path):
    return persistent_root.PersistentRoot(
        path=storage.absolute(tmp_path / "steps"), in_place=request.param == "in place"
    )


@pytest.fixture
def tier(root):
    """The steps as they are when it is called."""
    return lambda: persistent_tier.PersistentTier(root, run=uploaded.RUN)


@pytest.fixture
def world():
    return uploaded.hosts(3)


def put(root, world, step=5, *, save="0", **options):
    """Uploads and commits a step."""
    saved = uploaded.saved_step(step, save=save)
    uploaded.write_all(root, saved, world, **options)
    uploaded.commit_all(root, saved)
    return saved


def tree(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in pathlib.Path(directory).rglob("*")
        if path.is_file()
    }


def test_steps_of_plain_orbax_are_told_apart_and_not_replaced(root, tier, world):
    saved = put(root, world)
    storage.write_atomic(
        storage.make_directory(root.final(7)) / persistent_root.COMMIT_FILE, b"done"
    )
    assert steps_of(tier()) == [5]
    assert list(tier().foreign_saves()) == [7]
    assert not tier().offers(7).copies
    with pytest.raises(errors.CheckpointError, match="Orbax saved"):
        upload.Upload(root, uploaded.saved_step(7), world[0]).begin()
    with pytest.raises(errors.CheckpointError, match="nothing is left to upload"):
        upload.Upload(root, saved, world[0]).begin()


@pytest.mark.parametrize("missing", ["everything", "chunk", "file"])
def test_half_a_step_is_refused(root, tier, world, missing):
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    if missing == "chunk":
        items = items[1:]
    if missing == "file":
        items = items[:-1]
    if missing != "everything":
        uploaded.write(root, saved, world[0], items)
    messages = {
        "everything": "no host has uploaded",
        "chunk": r"lacks parts of 1 of 5 arrays and files: .state/params/b\[0:6\]",
        "file": r"lacks parts of 1 of 5 arrays and files: .data/shards-00002.json.;",
    }
    with pytest.raises(errors.CheckpointError, match=messages[missing]):
        uploaded.commit_all(root, saved)
    assert steps_of(tier()) == []


def test_an_upload_that_was_cut_short_is_repeated_on_other_hosts(root, tier, world):
    saved = uploaded.saved_step()
    # Two finished, with wrong values and files that are of no use any more.
    uploaded.write_all(root, saved, world[:2], seed=1)
    stray = root.unfinished(StepId(5, "0"))
    storage.write_atomic(stray / "data" / "shards-00007.json", b"stray")
    uploaded.write_all(root, saved, world[1:])
    with pytest.raises(errors.CheckpointError, match="different values"):
        uploaded.commit_all(root, saved)
    # What differed is not there any more.
    uploaded.write_all(root, saved, world[1:])
    uploaded.commit_all(root, saved)
    uploaded.read(tier(), 5)
    names = set(tree(root.final(5)))
    assert "manifest-m0.0" not in names
    assert "data/shards-00007.json" not in names
    assert not any(ocdbt.store_name("m0.0", "0") in name for name in names)


def test_an_upload_that_was_killed_does_not_send_again_what_is_there(
    root, tier, monkeypatch
):
    monkeypatch.setattr(upload, "_PROGRESS_SECS", 0.0)
    monkeypatch.setattr(upload, "_PROGRESS_SHARE", 0)
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    # Chunks of another save are of no use.
    other = uploaded.saved_step(save="1")
    uploaded.write(root, other, uploaded.hosts(1)[0], items, finish=False)
    sent = []
    write = ocdbt.write

    def counted(directory, chunks, context):
        sent.extend(chunks)
        write(directory, chunks, context)

    monkeypatch.setattr(ocdbt, "write", counted)
    # Three worlds of other hosts, of which the first two are killed after 0.8 of their
    # work: the third finishes it.
    for count, is_killed in ((3, True), (2, True), (4, False)):
        world = uploaded.hosts(count)
        for number, host in enumerate(world):
            share = items[number::count]
            end = len(share) * 4 // 5 if is_killed else None
            uploaded.write(root, saved, host, share[:end], finish=not is_killed)
        # An index that was cut short, longer than any that follows.
        for store in root.unfinished(saved.step_id).glob("*/ocdbt.process_*"):
            (store / "manifest.ocdbt.__lock").write_bytes(bytes(10**5))
    assert len(sent) == len(items) - len(uploaded.COMPONENT)
    uploaded.commit_all(root, saved)
    uploaded.read(tier(), 5)


def test_a_committed_step_is_replaced_by_no_older_save(root, world):
    put(root, world, save="1")
    before = tree(root.final(5))
    older = uploaded.saved_step(save="0")
    ours = upload.Upload(root, older, world[0])
    for act in (ours.begin, lambda: uploaded.commit_all(root, older)):
        with pytest.raises(errors.CheckpointError, match=r"its save is 1.*remove it"):
            act()
    assert tree(root.final(5)) == before


def test_a_committed_step_is_replaced_by_a_newer_save_and_set_aside(root, tier, world):
    put(root, world)
    before = tree(root.final(5))
    later = uploaded.saved_step(save="1")

    def set_aside():
        of_later = Line(save="1", parents=())
        leases.arrange(root, of_later, run=uploaded.RUN, step=5, watch={})

    if root.in_place:
        with pytest.raises(errors.CheckpointError, match="its save is 0"):
            upload.Upload(root, later, world[0]).begin()
        set_aside()
    uploaded.write_all(root, later, world, seed=3)
    assert root.is_committed(5) != root.in_place
    uploaded.commit_all(root, later, make_way=set_aside)
    assert tree(root.aside(StepId(5, "0"))) == before
    assert tier().known_saves() == [(5, "0"), (5, "1")]
    root.remove(root.aside(StepId(5, "0")))
    uploaded.read(tier(), 5, seed=3)
    assert not root.leftovers()


def test_chunks_may_be_written_by_many_threads(root, tier, world):
    saved = uploaded.saved_step()
    ours = upload.Upload(root, saved, world[0])
    ours.begin()
    with futures.ThreadPoolExecutor(16) as threads:
        list(
            threads.map(
                lambda item: uploaded.put(ours, saved, item), uploaded.items(saved)
            )
        )
    ours.finish()
    for _ in range(2):
        # A commit may be repeated.
        uploaded.commit_all(root, saved)
        uploaded.read(tier(), 5)


def test_a_removed_step_is_gone_at_once_and_a_killed_removal_leaves_a_leftover(
    root, tier, world
):
    put(root, world, step=5)
    put(root, world, step=6)
    root.remove(root.final(5))
    assert steps_of(tier()) == [6]
    assert not root.leftovers()
    root.uncommit(root.final(6))
    assert steps_of(tier()) == []
    (leftover,) = root.leftovers()
    assert leftover.step == 6
    storage.remove(leftover.path)
    assert not root.leftovers()


def test_a_search_has_the_steps_of_when_it_began(root, tier, world):
    put(root, world, step=5)
    now = tier()
    assert steps_of(now) == [5]
    put(root, world, step=6)
    assert steps_of(now) == [5]
    assert steps_of(tier()) == [5, 6]
    # What a step has is asked again.
    root.remove(root.final(5))
    assert not now.offers(5).copies


def test_retention_hears_of_time_and_metrics(root, tier, world):
    saved = uploaded.saved_step()
    uploaded.write_all(root, saved, world)
    upload.commit(
        root,
        saved,
        hosts=[host.id for host in world],
        orbax_files={
            "_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 1700000000000000000}',
            "metrics/metrics": b'{"loss": 1.5}',
        },
    )
    (held,) = tier().held(LINE)
    assert (held.step, held.metrics, held.complete) == (5, {"loss": 1.5}, True)
    assert held.time == datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)


def test_a_step_whose_metrics_cannot_be_read_is_kept_and_asked_again(root, tier, world):
    saved = uploaded.saved_step()
    uploaded.write_all(root, saved, world)
    files = {"metrics/metrics": b'{"loss": 1.5}'}
    upload.commit(root, saved, hosts=(), orbax_files=files)
    pathlib.Path(root.final(5), "metrics", "metrics").write_text('{"lo')
    (held,) = tier().held(LINE)
    assert held.complete is None
    pathlib.Path(root.final(5), "metrics", "metrics").write_bytes(*files.values())
    (held,) = tier().held(LINE)
    assert (held.complete, held.metrics) == (True, {"loss": 1.5})


def test_a_step_of_another_run_is_offered_as_nothing(root, world):
    put(root, world)
    other = persistent_tier.PersistentTier(root, run="another")
    offered = other.offers(5)
    assert not offered.copies
    assert len(offered.problems) == 3
    # Nor will that run's retention ever touch it.
    assert not other.held(LINE)


def test_what_cannot_be_read_is_said(root, tier, world):
    put(root, world)
    (saved, reader), *_ = tier().offers(5).copies
    chunk, file = saved.contents.leaves[1], saved.contents.leaves[-1]
    box = boxes.whole(chunk.chunk)
    elsewhere = dataclasses.replace(chunk, path="state/params/none")
    gone = dataclasses.replace(file, path="data/none.json")
    for leaf, num_bytes, message in (
        (file, 8, "ends after 3 bytes, before 8"),
        (gone, 8, "is missing"),
        (chunk, 99, "ends after 28 bytes"),
        (elsewhere, 8, "is missing"),
    ):
        with pytest.raises(source.ReadError, match=message):
            reader.read_into(leaf, box, memoryview(bytearray(num_bytes)))


def test_of_a_damaged_file_comes_no_wrong_value_that_passes_its_digest(
    root, tier, world
):
    put(root, world)
    kept = tree(root.final(5))
    generator = random.Random(7)
    for damage in ("flipped", "cut short", "emptied", "scrambled"):
        noticed = 0
        for name, content in kept.items():
            path = pathlib.Path(root.final(5), name)
            spoilt_files.spoil(path, damage, generator, other=b"")
            offered = tier().offers(5)
            noticed += len(offered.problems) + sum(
                not healthy(*each) for each in offered.copies
            )
            path.write_bytes(content)
        # Each host has a manifest and a file of values at least.
        assert noticed >= 2 * len(world)
    uploaded.read(tier(), 5)


def healthy(held, reader):
    """Whether all that a host lists could be read with its digest; then it is right."""
    for number, box, named in held.rows():
        leaf = held.contents.leaves[number]
        memory = np.zeros(leaf.num_bytes(box), np.uint8)
        try:
            reader.read_into(leaf, box, memory.data)
        except source.ReadError:
            return False
        if digest.values_digest(memory) != named:
            return False
        right = uploaded.piece_of(uploaded.saved_step(), (number, box))
        assert memory.tobytes() == right.tobytes()
    return True


def test_steps_that_cannot_be_listed_are_an_error_that_says_so(tmp_path):
    storage.write_atomic(tmp_path / "steps", b"a file")
    tier = persistent_tier.PersistentTier(
        persistent_root.PersistentRoot.from_path(tmp_path / "steps"), run=uploaded.RUN
    )
    with pytest.raises(errors.CheckpointError, match="cannot be read or listed"):
        steps_of(tier)


def test_object_stores_commit_by_a_file_and_paths_by_a_rename(tmp_path):
    for place in ("gs://bucket/run", "s3://bucket/run"):
        assert persistent_root.PersistentRoot.from_path(place).in_place
    assert not persistent_root.PersistentRoot.from_path(tmp_path).in_place


@pytest.fixture
def slept(monkeypatch):
    """The seconds of each wait, which takes no time."""
    slept = []
    monkeypatch.setattr(clock, "sleep", slept.append)
    return slept


def failing(*problems):
    """Raises each of some errors in turn, then answers."""
    pending = list(problems)

    def act():
        if pending:
            raise pending.pop(0)
        return "done"

    return act


def test_what_may_pass_is_waited_for_longer_and_longer_and_logged(slept, caplog):
    for problem in (
        OSError(errno.EIO, "input/output error"),
        TimeoutError("timed out"),
        ValueError("UNAVAILABLE: the store is away"),
    ):
        slept.clear()
        caplog.clear()
        assert retries.call("writing /a", failing(*[problem] * 7)) == "done"
        assert 0.25 <= slept[0] <= 0.5 <= slept[1] <= 1 <= slept[2] <= 2
        assert 15 <= slept[6] <= 30
        assert len(caplog.messages) == 7
        assert "writing /a failed, attempt 1 of 8" in caplog.messages[0]
        # In the end waiting is given up.
        slept.clear()
        given_up = r"writing /a failed, attempt 8 of 8.*again"
        with pytest.raises(errors.CheckpointError, match=given_up):
            retries.call("writing /a", failing(*[problem] * 8))
        assert len(slept) == 7


def test_what_will_not_pass_is_an_error_at_once(slept):
    for problem in (
        PermissionError(errno.EACCES, "no"),
        OSError(errno.EROFS, "read-only"),
        OSError(errno.ENOSPC, "no space left"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device"),
        ValueError("PERMISSION_DENIED: no"),
    ):
        with pytest.raises(errors.CheckpointError, match="with its next backup"):
            retries.call("writing /a", failing(problem))
        assert not slept
    # What storage did not say is an error of the program.
    with pytest.raises(ValueError, match="a bug"):
        retries.call("writing /a", failing(ValueError("a bug")))
    assert not slept
