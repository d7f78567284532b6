"""Records beside the steps in storage: who writes, who reads, and who serves."""

import contextlib
import pathlib
import subprocess
import sys
import time

import pytest

from elastic_ckpt.core import bucket_clients, clock, errors, storage
from elastic_ckpt.steps import line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.peers import run_agents
from elastic_ckpt.tiers.peers.run_agents import RunAgents
from elastic_ckpt.tiers.persistent import (
    claims,
    leases,
    persistent_root,
    persistent_tier,
    retries,
    upload,
    writers,
)
from tests.tiers import uploaded
from tests.tiers.test_evaluations import committed

A = claims.Claimant(name="a")
B = claims.Claimant(name="b")
A_AGAIN = claims.Claimant(name="a", has_claimed=True)
OLD, NOW, LATER = (f"{number:015d}" for number in (5, 6, 7))


def line_of(save):
    return line.Line(save=save, parents=((40, "7"),))


def claim(steps, save, claimant=A):
    return claims.claim(steps, line_of(save), run="tiny", claimant=claimant)


class TestClaims:
    """Each world of a run belongs to one start: the first that creates its record."""

    @pytest.mark.parametrize("place", ["local", "gs", "s3"])
    def test_a_replaced_start_claims_and_commits_no_more(self, place, steps_in):
        steps = steps_in(place)
        assert claims.newest(steps) is None
        first = claim(steps, "8")
        assert claims.newest(steps) == first
        claims.check(steps, first)
        second = claim(steps, "9", B)
        assert claims.newest(steps) == second
        assert [first.number, second.number] == [1, 2]
        with pytest.raises(errors.ReplacedError, match="b, has continued it as world"):
            claims.check(steps, first)
        assert claims.is_replaced(steps, 1)
        assert not claims.is_replaced(steps, 2)
        # Its clock may be ahead.
        with pytest.raises(errors.ReplacedError, match="world 2"):
            claim(steps, "99", A_AGAIN)
        claims.check(steps, second)

    def test_a_start_claims_each_of_its_worlds(self, tmp_path):
        first, second = claim(tmp_path, "8"), claim(tmp_path, "9", A_AGAIN)
        assert [first.number, second.number] == [1, 2]
        assert not claims.is_replaced(tmp_path, 1)
        # Another start, whose search was before that, has lost.
        with pytest.raises(errors.ReplacedError, match="a, has continued it as world"):
            claim(tmp_path, "9", B)
        assert claim(tmp_path, "95", B).number == 3

    def test_one_of_two_simultaneous_claims_wins(self, tmp_path, monkeypatch):
        create = storage.create

        def late(path, content):
            monkeypatch.undo()
            claim(tmp_path, "8", B)
            return create(path, content)

        monkeypatch.setattr(storage, "create", late)
        with pytest.raises(errors.ReplacedError, match="b, has continued it as world"):
            claim(tmp_path, "9", A)
        assert claims.newest(tmp_path).claimant == "b"

    def test_a_claim_whose_answer_was_lost_is_that_of_its_start(
        self, tmp_path, monkeypatch
    ):
        create = storage.create
        with monkeypatch.context() as patch:
            # A client repeats its request.
            patch.setattr(
                storage, "create", lambda *each: (create(*each), create(*each))[1]
            )
            first = claim(tmp_path, "8")
            assert first == claims.newest(tmp_path)

        def lose(path, content):
            create(path, content)
            raise OSError(5, "the answer is lost", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(storage, "create", lose)
            with pytest.raises(errors.CheckpointError, match="out of reach"):
                claim(tmp_path, "9", A_AGAIN)
        second = claims.check(tmp_path, first, line_of("9"))
        assert (second.number, second) == (2, claims.newest(tmp_path))
        # Another world of the start has another line.
        for other in (None, line_of("8")):
            with pytest.raises(errors.ReplacedError, match="a, has continued it"):
                claims.check(tmp_path, first, other)
        claim(tmp_path, "95", B)
        with pytest.raises(errors.ReplacedError, match="b, has continued it as world"):
            claims.check(tmp_path, first, line_of("9"))

    def test_a_damaged_claim_or_storage_out_of_reach_is_an_error(self, tmp_path):
        claim(tmp_path, "8")
        path = tmp_path / claims.DIRECTORY / "1.json"
        altered = path.read_bytes().replace(b'"claimant": "a"', b'"claimant": "b"')
        path.write_bytes(altered)
        for act in (lambda: claims.newest(tmp_path), lambda: claim(tmp_path, "9")):
            with pytest.raises(errors.CheckpointError, match=r"1\.json was altered"):
                act()
        (tmp_path / "file").write_text("")
        with pytest.raises(errors.CheckpointError, match="out of reach"):
            claim(tmp_path / "file", "8")

    def test_a_list_that_lags_hides_no_claim(self, tmp_path, monkeypatch):
        for save in ("5", "6", "7"):
            newest = claim(tmp_path, save)
        # As in a bucket.
        monkeypatch.setattr(storage, "is_local", lambda _: False)
        monkeypatch.setattr(claims, "numbers", lambda _: [1])
        assert claims.newest(tmp_path) == newest


def lease(path, act=lambda: None, **options):
    with leases.lease(path, **options):
        act()


def lease_files(root):
    return sorted(each.name for each in (root.path / leases.DIRECTORY).iterdir())


class TestLeases:
    """A step that is leased is not removed; a lease of a removed one is refused."""

    @pytest.fixture
    def root(self, tmp_path):
        root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
        committed(root, 1, 2)
        (root.final(1) / "manifest-0.json").write_text("{}")
        return root

    def test_a_step_is_leased_while_the_block_runs(self, root):
        watch = leases.Watch()
        with leases.lease(root.final(1)) as path:
            assert path == root.final(1)
            with leases.lease(root.final(1)), leases.lease(root.final(2)):
                assert watch.leased(root) == {1, 2}
            assert watch.leased(root) == {1}
            # A removal sees it, announced before or after.
            with leases.announced(root, [1], by=NOW):
                assert leases.Watch().leased(root) == {1}
        assert watch.leased(root) == set()
        # Also by the path of a part; but not a step of another program.
        for part in ("", "state"):
            with leases.leased_if_ours(root.final(1) / part):
                assert leases.Watch().leased(root) == {1}
        with leases.leased_if_ours(root.final(2)):
            assert leases.Watch().leased(root) == set()
        assert lease_files(root) == []

    def test_a_step_that_is_being_removed_or_is_not_there_is_not_leased(
        self, root, tmp_path
    ):
        with leases.announced(root, [1], by=NOW):
            with pytest.raises(leases.StepGoneError, match="is being removed"):
                lease(root.final(1))
            lease(root.final(2))
        lease(root.final(1))
        for path in (root.final(3), tmp_path / "other"):
            with pytest.raises(leases.StepGoneError, match="name PERSISTENT_DIRECTORY"):
                lease(path)
        assert lease_files(root) == []

    def test_a_lease_that_is_not_renewed_expires_by_the_clock_of_the_remover(
        self, root, monkeypatch
    ):
        now_secs = 0.0
        monkeypatch.setattr(clock, "monotonic", lambda: now_secs)
        watch = leases.Watch()
        held = leases._Lease(root.final(1), 100.0)
        held.begin()
        try:
            for secs in (0.0, 99.0):
                now_secs = secs
                assert watch.leased(root) == {1}
            held._write()
            for secs in (150.0, 249.0):
                now_secs = secs
                assert watch.leased(root) == {1}
            now_secs = 251.0
            assert watch.leased(root) == set()
            assert lease_files(root) == []
        finally:
            # Its holder finds that it was lost.
            assert held.end() is not None

    def test_a_lease_is_renewed_for_as_long_as_it_takes(self, root, monkeypatch):
        # Often, and yet not lost where a thread waits for seconds.
        monkeypatch.setattr(leases, "_RENEWALS", 10_000)
        monkeypatch.setattr(clock, "monotonic", lambda: 0.0)
        watch, contents = leases.Watch(), set()
        with leases.lease(root.final(1), duration_secs=600.0):
            (name,) = lease_files(root)
            deadline = time.monotonic() + 600
            while len(contents) < 3:
                assert time.monotonic() < deadline, "it is not renewed"
                contents.add((root.path / leases.DIRECTORY / name).read_bytes())
                assert watch.leased(root) == {1}

    @pytest.mark.parametrize("loss", ["removed", "saved again", "expired"])
    def test_a_reader_whose_lease_was_lost_gets_an_error(self, root, loss):
        def lose():
            if loss == "removed":
                storage.remove(root.final(1))
            elif loss == "saved again":
                committed(root, 1, save=f"{200:015d}")
            else:
                for name in lease_files(root):
                    storage.remove(root.path / leases.DIRECTORY / name)

        with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
            lease(root.final(1), lose)

    def test_announcements_of_worlds_that_were_killed_are_finished_and_removed(
        self, root
    ):
        killed = leases.announced(root, [1], by=OLD)
        killed.__enter__()
        assert lease_files(root) == [f"removing-{OLD}.json"]
        with leases.announced(root, [2], by=NOW) as cut_short:
            assert cut_short == {1}
            with pytest.raises(leases.StepGoneError, match="is being removed"):
                lease(root.final(1))
        assert lease_files(root) == []


def put(root, step, save, *, commit=False):
    """Uploads all of a step, and commits it or not."""
    saved, hosts = uploaded.saved_step(step, save=save), uploaded.hosts(2)
    uploaded.write_all(root, saved, hosts)
    if commit:
        uploaded.commit_all(root, saved, hosts)


def left(root):
    return [each.step for each in root.leftovers()]


# A program that joins, prints a line, and waits.
WRITER = (
    "import signal, sys\n"
    "from elastic_ckpt.core import storage\n"
    "presence = storage.Presence(sys.argv[1])\n"
    "print('there', flush=True)\n"
    "signal.pause()\n"
)


class TestWriters:
    """Leftovers of dead uploads are removed, files of live ones stay."""

    @pytest.fixture(params=[False, True], ids=["renamed", "in place"])
    def root(self, request, tmp_path):
        path = storage.absolute(tmp_path / "steps")
        return persistent_root.PersistentRoot(path=path, in_place=request.param)

    @pytest.fixture
    def world(self, root):
        with contextlib.closing(writers.WritingWorld(root, run=uploaded.RUN)) as world:
            yield world

    def test_a_world_removes_the_uploads_of_older_ones_and_its_own_that_failed(
        self, root, world
    ):
        put(root, 3, OLD, commit=True)
        for step, save in ((4, OLD), (5, NOW), (6, LATER), (7, "orbax-own"), (8, NOW)):
            put(root, step, save)
        assert [each.step for each in world.discard_dead(before=NOW)] == [4]
        assert left(root) == [5, 6, 7, 8]
        assert len(world.discard_own(StepId(8, NOW))) == 1
        assert left(root) == [6, 7, 8]
        uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 3)

    def test_what_another_run_or_orbax_is_writing_stays(self, root, world):
        put(root, 4, OLD)
        for step in (5, 6):
            unfinished = root.unfinished(StepId(step, "1700000000000000"))
            storage.write_atomic(unfinished / "state" / "d" / "x", b"")
        with contextlib.closing(writers.WritingWorld(root, run="another")) as other:
            if root.in_place:
                # The name has no save there, and the manifest is of another run.
                assert other.discard_dead(before=NOW) == []
        assert len(world.discard_dead(before=NOW)) == 1
        assert left(root) == [5, 6]

    def test_nothing_is_committed_once_a_world_has_said_that_it_writes_no_more(
        self, world
    ):
        world.be_present()
        with world.committing():
            pass
        world.close()
        with pytest.raises(errors.CheckpointError, match="was closed before"):
            world.committing().__enter__()

    def test_a_world_that_was_killed_writes_no_more(self, tmp_path):
        root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
        world = writers.WritingWorld(root, run=uploaded.RUN)
        command = [sys.executable, "-c", WRITER, root.path / writers.LOCK]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "there\n"
            put(root, 4, OLD)
            removed = world.discard_dead(before=NOW)
            writer.kill()
        assert removed == []
        assert len(world.discard_dead(before=NOW)) == 1
        world.close()

    def test_who_has_claimed_a_run_without_locks_removes_what_is_long_dead(
        self, tmp_path, monkeypatch
    ):
        path = storage.absolute(tmp_path / "steps")
        root = persistent_root.PersistentRoot(path=path, in_place=True)
        put(root, 3, OLD, commit=True)
        put(root, 4, OLD)
        put(root, 5, LATER)
        # The rests of removals that were cut short.
        for rest in (root.final(6), root.aside(StepId(2, OLD))):
            storage.write_atomic(rest / "state" / "d" / "x", b"")
        # As in a bucket.
        monkeypatch.setattr(storage, "is_local", lambda _: False)
        monkeypatch.setattr(bucket_clients, "last_written", lambda _: time.time())
        world = writers.WritingWorld(root, run=uploaded.RUN)
        assert world.discard_dead(before=NOW, is_claimed=True) == []
        monkeypatch.setattr(writers, "_QUIET_SECS", -60.0)
        assert world.discard_dead(before=NOW) == []
        removed = world.discard_dead(before=NOW, is_claimed=True)
        assert [each.step for each in removed] == [2, 4, 6]
        world.close()
        monkeypatch.undo()
        assert left(root) == [5]
        uploaded.read(persistent_tier.PersistentTier(root, run=uploaded.RUN), 3)


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in pathlib.Path(directory).rglob("*")
        if path.is_file()
    }


def test_what_a_replaced_start_still_uploads_in_place_does_not_count(tmp_path):
    hosts = uploaded.hosts(4)
    path = storage.absolute(tmp_path / "steps")
    root = persistent_root.PersistentRoot(path=path, in_place=True)

    def claimed(save):
        of_save = line.Line(save=save, parents=())
        start = claims.new_claimant()
        claims.claim(root.path, of_save, run=uploaded.RUN, claimant=start)
        return uploaded.saved_step(save=save)

    old = claimed("8")
    # The first of them has a successor of the same name, the last has none.
    once = retries.Retries(attempts=1)
    late = [
        upload.Upload(root, old, host, retries=once) for host in (hosts[0], hosts[3])
    ]
    *chunks, file, _ = uploaded.items(old)
    for each in late:
        each.begin()
        uploaded.put(each, old, chunks[0], seed=1)
    new = claimed("9")
    # Its file gives way to that of the start that continues.
    storage.write_atomic(root.final(5) / file.path, b"of a replaced start")
    uploaded.write_all(root, new, hosts[:3])
    uploaded.commit_all(root, new, hosts[:3])
    committed = contents(root.final(5))
    # The commit has removed its store.
    with pytest.raises(errors.CheckpointError, match="NOT_FOUND"):
        uploaded.put(late[0], old, chunks[1], seed=1)
    with pytest.raises(errors.ReplacedError, match="as world 2"):
        late[0].write_file(file, b"another")
    with pytest.raises(errors.ReplacedError, match="as world 2"):
        late[0].finish()
    late[1].finish()
    now = contents(root.final(5))
    assert {name: now[name] for name in committed} == committed
    # Its name is the first of all manifests.
    late_manifest = root.final(5) / "manifest-m3.0.json"
    storage.rename(late_manifest, root.final(5) / "manifest-a.json")
    assert root.save_of(5, run=uploaded.RUN) == "9"
    assert not root.is_pending(StepId(5, "9"), run=uploaded.RUN)
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    (held,) = tier.held()
    assert (held.complete, held.step) == (True, 5)


DAY = 24 * 3600.0


def seen(url, days_ago=0):
    return run_agents.Seen(url, DAY * (1000 - days_ago))


class TestAgents:
    """The record of a run's agents, in storage and in each RAM disk."""

    def test_each_world_replaces_it_and_one_without_agents_has_none(self, tmp_path):
        assert run_agents.read(tmp_path) is None
        old = {
            "m1": seen("http://a", 3),
            "m2": seen("http://b"),
            "m3": seen("http://c"),
        }
        for these in (old, {"m1": seen("http://d")}):
            agents = RunAgents("mine", these)
            run_agents.write(tmp_path, agents)
            assert run_agents.read(tmp_path) == agents
        assert RunAgents("mine", old).urls == {"m2": "http://b", "m3": "http://c"}
        run_agents.forget(tmp_path, "http://e")
        run_agents.forget(tmp_path, "http://d")
        assert run_agents.read(tmp_path) is None

    def test_an_altered_record_is_an_error_in_storage_and_none_in_ram(self, tmp_path):
        run_agents.write(tmp_path, RunAgents("mine", {"m1": seen("http://a:8470")}))
        path = tmp_path / run_agents.FILE
        for content in (path.read_bytes().replace(b"8470", b"8471"), b"", b"[1]"):
            path.write_bytes(content)
            with pytest.raises(errors.CheckpointError, match="writes it anew"):
                run_agents.read(tmp_path)
            assert run_agents.known(tmp_path) == {}

    def test_of_an_agent_that_moved_the_last_place_counts_for_two_weeks(self):
        old, new = {"m1": seen("http://a", 3)}, {"m1": seen("http://b", 2)}
        now_secs = 1000 * DAY
        for recorded in ([old, new], [new, old]):
            assert run_agents.joined(recorded, {}, now_secs=now_secs) == new
        agents = run_agents.joined([old, new], {"m1": "http://c"}, now_secs=now_secs)
        assert agents == {"m1": seen("http://c")}
        recorded = [{"m1": seen("http://a", 13), "m2": seen("http://b", 15)}]
        joined = run_agents.joined(recorded, {}, now_secs=now_secs)
        assert list(joined) == ["m1"]
