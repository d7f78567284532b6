"""A start that was replaced while it uploaded in place changes nothing that counts."""

import pathlib

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import line
from elastic_ckpt.tiers.persistent import (
    arrange,
    claims,
    persistent_root,
    persistent_tier,
    retries,
    upload,
)
from tests.tiers import uploaded

HOSTS = uploaded.hosts(4)


def claim(root, save):
    of_save = line.Line(save=save, parents=())
    claims.claim(root.path, of_save, run=uploaded.RUN, claimant=claims.new_claimant())


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in pathlib.Path(directory).rglob("*")
        if path.is_file()
    }


def test_what_a_replaced_start_still_uploads_in_place_does_not_count(tmp_path):
    path = storage.absolute(tmp_path / "steps")
    root = persistent_root.PersistentRoot(path=path, in_place=True)
    claim(root, "8")
    old = uploaded.saved_step(save="8")
    # The first of them has a successor of the same name, the last has none.
    once = retries.Retries(attempts=1)
    late = [
        upload.Upload(root, old, host, retries=once) for host in (HOSTS[0], HOSTS[3])
    ]
    *chunks, file, _ = uploaded.items(old)
    for each in late:
        each.begin()
        uploaded.put(each, old, chunks[0], seed=1)

    claim(root, "9")
    new = uploaded.saved_step(save="9")
    uploaded.write_all(root, new, HOSTS[:3])
    uploaded.commit_all(root, new, HOSTS[:3])
    committed = files(root.final(5))
    # The commit has removed its store.
    with pytest.raises(errors.CheckpointError, match="NOT_FOUND"):
        uploaded.put(late[0], old, chunks[1], seed=1)
    with pytest.raises(errors.ReplacedError, match="as world 2"):
        late[0].write_file(file, b"another")
    with pytest.raises(errors.ReplacedError, match="as world 2"):
        late[0].finish()
    late[1].finish()

    now = files(root.final(5))
    assert {name: now[name] for name in committed} == committed
    # Its name is the first of all manifests.
    late_manifest = root.final(5) / "manifest-m3.0.json"
    storage.rename(late_manifest, root.final(5) / "manifest-a.json")
    assert arrange.save_of(root, 5, run=uploaded.RUN) == "9"
    assert not root.is_pending(5, run=uploaded.RUN, save="9")
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    (held,) = tier.held()
    assert held.complete
    assert held.step == 5


def test_a_file_of_a_replaced_start_gives_way_to_that_of_the_one_that_continues(
    tmp_path,
):
    path = storage.absolute(tmp_path / "steps")
    root = persistent_root.PersistentRoot(path=path, in_place=True)
    claim(root, "9")
    saved = uploaded.saved_step(save="9")
    file = uploaded.files()[0]
    ours = upload.Upload(root, saved, HOSTS[0])
    ours.begin()
    storage.write_atomic(root.final(5) / file.path, b"of a replaced start")
    for item in uploaded.items(saved):
        uploaded.put(ours, saved, item)
    ours.finish()
    uploaded.commit_all(root, saved, HOSTS[:1])
    uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 5)
