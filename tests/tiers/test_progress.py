"""An upload that is cut short is continued by other hosts; nothing is written twice."""

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.persistent import (
    persistent_root,
    persistent_tier,
    progress,
    upload,
)
from tests.tiers import uploaded


@pytest.fixture(params=["renamed", "in place"])
def root(request, tmp_path):
    return persistent_root.PersistentRoot(
        path=storage.absolute(tmp_path / "steps"), in_place=request.param == "in place"
    )


@pytest.fixture(autouse=True)
def always_noted(monkeypatch):
    monkeypatch.setattr(upload, "_PROGRESS_SECS", 0.0)
    monkeypatch.setattr(upload, "_PROGRESS_SHARE", 0)


def part(saved, item, *, seed=0):
    if isinstance(item, manifest.ComponentFile):
        return item
    leaf, box = item
    whole = uploaded.values(saved.contents.leaves[leaf].path, seed=seed)
    piece = whole[tuple(map(slice, box.start, box.stop))].copy()
    return manifest.Fragment(
        leaf=leaf,
        box=box,
        digest=uploaded.digest.values_digest(piece),
        file="",
        offset=0,
        stored_bytes=piece.nbytes,
    )


def go_on(root, saved, host, share, *, finish=True):
    """A host uploads of its share what is not in storage; returns how much that was."""
    everything = uploaded.items(saved)
    ours = upload.Upload(root, saved, host)
    ours.begin(lambda: {progress.part_of(part(saved, item)) for item in everything})
    written = 0
    for item in share:
        if ours.has(part(saved, item)):
            continue
        written += 1
        uploaded.put(ours, saved, item)
    if finish:
        ours.finish()
    return written


def test_worlds_that_are_killed_again_and_again_upload_a_step_together(root):
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    counts = []
    # Each world has other hosts, or the same with other shares, and is killed early.
    for hosts, num_items in ((3, 1), (2, 1), (3, 2)):
        world = uploaded.hosts(hosts)
        counts.append(
            sum(
                go_on(root, saved, host, items[n::hosts][:num_items], finish=False)
                for n, host in enumerate(world)
            )
        )
    world = uploaded.hosts(2)
    counts += [go_on(root, saved, host, items[n::2]) for n, host in enumerate(world)]
    assert sum(counts) == len(items)
    assert 0 < sum(counts[-2:]) < len(items)
    uploaded.commit_all(root, saved, world)
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    uploaded.read(tier, 5)
    assert not [
        each for each in root.final(5).iterdir() if each.name.startswith("progress-")
    ]


def test_parts_with_other_values_are_written_anew(root):
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    wrong = uploaded.hosts(3)
    for n, host in enumerate(wrong):
        uploaded.write(root, saved, host, items[n::3], seed=1, finish=n != 2)
    world = uploaded.hosts(2)
    written = [go_on(root, saved, host, items[n::2]) for n, host in enumerate(world)]
    # The files of components have the same contents.
    assert sum(written) >= len(items) - len(uploaded.files())
    uploaded.commit_all(root, saved, world)
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 5)


def test_an_index_that_was_cut_short_does_not_spoil_the_next(root):
    saved = uploaded.saved_step()
    items = uploaded.items(saved)
    (host,) = uploaded.hosts(1)
    # The index is written once more.
    go_on(root, saved, host, items[1:], finish=False)
    stores = list(root.path.glob("*/*/ocdbt.process_*"))
    assert stores
    for store in stores:
        # Longer than any that follows.
        (store / "manifest.ocdbt.__lock").write_bytes(bytes(10**5))
    go_on(root, saved, host, items)
    uploaded.commit_all(root, saved, [host])
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 5)


def test_an_upload_of_another_save_is_not_continued(root):
    items = uploaded.items(uploaded.saved_step())
    (host,) = uploaded.hosts(1)
    uploaded.write(root, uploaded.saved_step(save="0"), host, items, finish=False)
    saved = uploaded.saved_step(save="1")
    assert go_on(root, saved, host, items) == len(items)
    uploaded.commit_all(root, saved, [host])
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 5)
