import time

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.persistent import leases, persistent_root
from tests.tiers.test_evaluations import committed

BY = f"{100:015d}"


@pytest.fixture
def root(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    committed(root, 1, 2)
    return root


class Clock:
    secs = 0.0

    def __call__(self):
        return self.secs


def lease(path, act=lambda: None, **options):
    with leases.lease(path, **options):
        act()


def files(root):
    return sorted(each.name for each in (root.path / leases.DIRECTORY).iterdir())


def test_a_step_is_leased_while_the_block_runs(root):
    watch = leases.Watch()
    with leases.lease(root.final(1)) as path:
        assert path == root.final(1)
        assert watch.leased(root) == {1}
        with leases.lease(root.final(1)), leases.lease(root.final(2)):
            assert watch.leased(root) == {1, 2}
        assert watch.leased(root) == {1}
    assert watch.leased(root) == set()
    assert files(root) == []


def test_a_step_that_is_being_removed_is_not_leased(root):
    with leases.announced(root, [1], by=BY):
        with pytest.raises(leases.StepGoneError, match="is being removed"):
            lease(root.final(1))
        with leases.lease(root.final(2)):
            assert leases.Watch().leased(root) == {2}
    with leases.lease(root.final(1)):
        assert leases.Watch().leased(root) == {1}


def test_a_lease_is_seen_by_a_removal_that_was_announced_before_or_after(root):
    with leases.lease(root.final(1)), leases.announced(root, [1], by=BY):
        assert leases.Watch().leased(root) == {1}


def test_steps_that_are_not_there_are_not_leased(root, tmp_path):
    for path in (root.final(3), tmp_path / "other"):
        with pytest.raises(leases.StepGoneError, match="name PERSISTENT_DIRECTORY"):
            lease(path)
    assert files(root) == []


def test_a_lease_that_is_not_renewed_expires_by_the_clock_of_the_remover(root):
    clock = Clock()
    watch = leases.Watch(clock)
    lease = leases._Lease(root.final(1), 100.0)
    lease.begin()
    try:
        assert watch.leased(root) == {1}
        clock.secs = 99.0
        assert watch.leased(root) == {1}
        lease._write()
        clock.secs = 150.0
        assert watch.leased(root) == {1}
        clock.secs = 249.0
        assert watch.leased(root) == {1}
        clock.secs = 251.0
        assert watch.leased(root) == set()
        assert files(root) == []
    finally:
        # Its holder finds that it was lost.
        assert lease.end() is not None


def test_a_lease_is_renewed_for_as_long_as_it_takes(root, monkeypatch):
    # Often, and yet not lost where a thread waits for seconds.
    monkeypatch.setattr(leases, "_RENEWALS", 10_000)
    watch, contents = leases.Watch(Clock()), set()
    with leases.lease(root.final(1), duration_secs=600.0):
        (name,) = files(root)
        deadline = time.monotonic() + 600
        while len(contents) < 6:
            assert time.monotonic() < deadline, "it is not renewed"
            contents.add((root.path / leases.DIRECTORY / name).read_bytes())
            assert watch.leased(root) == {1}


def lose(root, loss):
    if loss == "removed":
        storage.remove(root.final(1))
    elif loss == "saved again":
        committed(root, 1, save=f"{200:015d}")
    else:
        for name in files(root):
            storage.remove(root.path / leases.DIRECTORY / name)


@pytest.mark.parametrize("loss", ["removed", "saved again", "expired"])
def test_a_reader_whose_lease_was_lost_gets_an_error(root, loss):
    with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
        lease(root.final(1), lambda: lose(root, loss))


def test_announcements_of_worlds_that_were_killed_are_finished_and_removed(root):
    killed = leases.announced(root, [1], by=f"{50:015d}")
    killed.__enter__()
    assert files(root) == [f"removing-{50:015d}.json"]
    with leases.announced(root, [2], by=BY) as cut_short:
        assert cut_short == {1}
        with pytest.raises(leases.StepGoneError, match="is being removed"):
            lease(root.final(1))
    assert files(root) == []
    lease(root.final(1))


@pytest.mark.parametrize("part", ["", "state"])
def test_a_step_of_ours_is_leased_by_the_path_of_a_part(root, part):
    (root.final(1) / "manifest-0.json").write_text("{}")
    with leases.leased_if_ours(root.final(1) / part):
        assert leases.Watch().leased(root) == {1}
    assert files(root) == []


def test_a_step_of_another_program_is_not_leased(tmp_path):
    (tmp_path / "2" / "state").mkdir(parents=True)
    with leases.leased_if_ours(tmp_path / "2"):
        assert [each.name for each in tmp_path.iterdir()] == ["2"]


def test_a_step_in_storage_that_cannot_be_written_to_is_read_without_a_lease(
    root, caplog
):
    (root.final(1) / "manifest-0.json").write_text("{}")
    (root.path / leases.DIRECTORY).write_text("no directory")
    with leases.leased_if_ours(root.final(1)):
        pass
    assert "without a lease" in caplog.text


def test_a_lease_lasts_for_a_positive_time(root):
    with pytest.raises(errors.ConfigError, match="positive"):
        lease(root.final(1), duration_secs=0)
