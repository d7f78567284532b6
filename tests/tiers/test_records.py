"""Records beside the steps in storage: who writes, who reads, and who serves."""

import dataclasses
import gc
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from elastic_ckpt.core import clock, errors, process, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import (
    claims,
    leases,
    persistent_root,
    persistent_tier,
    records,
    run_files,
    upload,
)
from elastic_ckpt.tiers.persistent.run_files import RunAgents
from tests.tiers import uploaded
from tests.tiers.test_evaluations import committed

OLD, NOW = (f"{number:015d}" for number in (5, 6))


def line_of(save):
    return Line(save=save, parents=((40, "7"),))


def begin(steps, name="a", **claimant):
    """A world of a start of a run that a launcher starts."""
    start = claims.Claimant(name=name, **claimant)
    writer = claims.Writer(steps, run="tiny", claimant=start)
    writer.begin()
    return writer


class TestClaims:
    """The newest start of a run writes; the others stop before they commit a step."""

    @pytest.mark.parametrize("place", ["local", "gs", "s3"])
    def test_a_replaced_start_claims_and_commits_no_more(self, place, steps_in):
        steps = steps_in(place)
        assert claims.newest(steps) is None
        old = begin(steps, "a")
        assert old.claim(line_of("8")) == 1
        first = claims.newest(steps)
        assert (first.number, first.line) == (1, line_of("8"))
        claims.check(steps, 1)
        new = begin(steps, "b")
        # Until it has a line of its own, that of the world before counts.
        assert claims.newest(steps).line == line_of("8")
        assert new.claim(line_of("9")) == 2
        assert claims.newest(steps).line == line_of("9")
        for act in (
            lambda: claims.check(steps, 1),
            old.check,
            # Its clock may be ahead.
            lambda: old.claim(line_of("99")),
            lambda: begin(steps, "a", has_claimed=True),
        ):
            with pytest.raises(errors.ReplacedError, match=r"b \(.* as world 2"):
                act()
        assert claims.is_replaced(steps, 1)
        assert not claims.is_replaced(steps, 2)
        claims.check(steps, 2)
        new.close()
        with pytest.raises(errors.CheckpointError, match="was closed before"):
            claims.check(steps, 2)

    def test_a_writer_that_is_dropped_gives_its_claim_back_in_a_thread_of_its_own(
        self, tmp_path, monkeypatch
    ):
        threads = []
        give_back = records.Held.give_back

        def noted(held):
            give_back(held)
            # Garbage of other tests may be collected, too.
            if held.path.is_relative_to(tmp_path):
                threads.append(threading.current_thread())

        monkeypatch.setattr(records.Held, "give_back", noted)
        writer = begin(tmp_path)
        del writer
        gc.collect()
        deadline = time.monotonic() + 600
        while not threads:
            assert time.monotonic() < deadline, "it is not given back"
        assert threads != [threading.current_thread()]
        assert begin(tmp_path, "b").number == 2

    def test_a_start_claims_each_of_its_worlds(self, tmp_path):
        begin(tmp_path).claim(line_of("8"))
        assert begin(tmp_path, has_claimed=True).claim(line_of("9")) == 2
        second = claims.newest(tmp_path)
        assert not claims.is_replaced(tmp_path, 1)
        # Another start, whose search was before that, has lost.
        other = begin(tmp_path, "b")
        with pytest.raises(errors.ReplacedError):
            other.claim(line_of("9"))
        assert other.claim(line_of("95")) == 3
        assert claims.newest(tmp_path).begun_ms == second.begun_ms

    def test_one_of_two_simultaneous_starts_writes(self, tmp_path, monkeypatch):
        create, others = storage.create, []

        def late(path, content, **options):
            monkeypatch.undo()
            others.append(begin(tmp_path, "b"))
            return create(path, content, **options)

        monkeypatch.setattr(storage, "create", late)
        begin(tmp_path).check()
        with pytest.raises(errors.ReplacedError, match=r"a \("):
            others[0].check()

    def test_a_request_whose_answer_was_lost_was_carried_out(
        self, tmp_path, monkeypatch
    ):
        create, write = storage.create, storage.write_atomic
        with monkeypatch.context() as patch:
            # A client repeats its request.
            patch.setattr(
                storage,
                "create",
                lambda *each, **more: (create(*each, **more), create(*each, **more))[1],
            )
            writer = begin(tmp_path)

        def lose(path, content, **options):
            write(path, content, **options)
            raise OSError(5, "the answer is lost", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_atomic", lose)
            with pytest.raises(errors.CheckpointError, match="the answer is lost"):
                writer.claim(line_of("8"))
        assert claims.newest(tmp_path).line == line_of("8")
        assert writer.claim(line_of("8")) == 1

    def test_a_damaged_claim_or_storage_out_of_reach_is_an_error(
        self, tmp_path, monkeypatch
    ):
        begin(tmp_path).claim(line_of("8"))
        path = tmp_path / claims.DIRECTORY / "1.json"
        path.write_bytes(path.read_bytes().replace(b'"start": "a"', b'"start": "b"'))
        for act in (claims.newest, begin):
            with pytest.raises(errors.CheckpointError, match=r"1\.json was altered"):
                act(tmp_path)

        def fail(_):
            raise OSError(5, "storage is away")

        monkeypatch.setattr(storage, "names", fail)
        with pytest.raises(errors.CheckpointError, match="out of reach"):
            claims.newest(tmp_path)

    def test_a_list_that_lags_hides_no_claim(self, tmp_path, monkeypatch):
        for save in ("5", "6", "7"):
            begin(tmp_path).claim(line_of(save))
        newest = claims.newest(tmp_path)
        assert newest.number == 3
        # As in a bucket.
        monkeypatch.setattr(storage, "is_local", lambda _: False)
        monkeypatch.setattr(storage, "names", lambda _: ["1.json"])
        assert claims.newest(tmp_path) == newest


def removing(root, steps, save):
    """Announces removals, as a world of this save does; yields leased steps."""
    return leases.removing(root, steps, line_of(save), watch={})


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
        watch = {}
        with leases.lease(root.final(1)) as path:
            assert path == root.final(1)
            with leases.lease(root.final(1)), leases.lease(root.final(2)):
                assert leases.leased(root, watch) == {1, 2}
            assert leases.leased(root, watch) == {1}
            # A removal sees it, announced before or after.
            with removing(root, [1], NOW) as leased:
                assert leased == {1}
        assert leases.leased(root, watch) == set()
        # Also by the path of a part; but not a step of another program.
        for part in ("", "state"):
            with leases.leased_if_ours(root.final(1) / part):
                assert leases.leased(root, {}) == {1}
        with leases.leased_if_ours(root.final(2)):
            assert leases.leased(root, {}) == set()
        assert lease_files(root) == []

    def test_a_step_that_is_being_removed_or_is_not_there_is_not_leased(
        self, root, tmp_path
    ):
        with removing(root, [1], NOW):
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
        watch = {}
        held = leases.lease(root.final(1), duration_secs=100.0)
        held.__enter__()
        (name,) = lease_files(root)
        path = root.path / leases.DIRECTORY / name
        record = records.read(path)
        # Of a program on another machine; one of this machine counts while it lives.
        far = dataclasses.replace(record.process, boot_id="another")
        for count, times in ((0, (0.0, 99.0)), (1, (150.0, 249.0))):
            there = dataclasses.replace(record, process=far, count=count)
            storage.write_atomic(path, records.to_bytes(there))
            for secs in times:
                now_secs = secs
                assert leases.leased(root, watch) == {1}
        now_secs = 251.0
        assert leases.leased(root, watch) == set()
        assert lease_files(root) == []
        # Its holder finds that it was lost.
        with pytest.raises(errors.CheckpointError, match="was lost while it was read"):
            held.__exit__(None, None, None)

    def test_a_lease_of_a_process_that_was_killed_is_over_at_once(self, root):
        program = (
            "import os, sys, elastic_ckpt as ec\n"
            "with ec.lease(sys.argv[1]):\n"
            "    os.kill(os.getpid(), 9)\n"
        )
        command = [sys.executable, "-c", program, root.final(1)]
        assert subprocess.run(command, check=False).returncode == -9
        assert len(lease_files(root)) == 1
        assert leases.leased(root, {}) == set()
        assert lease_files(root) == []

    def test_a_lease_is_renewed_for_as_long_as_it_takes(self, root, monkeypatch):
        # Often, and yet not lost where a thread waits for seconds.
        monkeypatch.setattr(records, "_RENEWALS", 10_000)
        monkeypatch.setattr(clock, "monotonic", lambda: 0.0)
        watch, contents = {}, set()
        with leases.lease(root.final(1), duration_secs=600.0):
            (name,) = lease_files(root)
            deadline = time.monotonic() + 600
            while len(contents) < 3:
                assert time.monotonic() < deadline, "it is not renewed"
                contents.add((root.path / leases.DIRECTORY / name).read_bytes())
                assert leases.leased(root, watch) == {1}

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
        killed = removing(root, [1], OLD)
        killed.__enter__()
        assert lease_files(root) == [f"1-{OLD}.removing"]
        # It had begun with step 3.
        storage.write_atomic(root.final(3) / "state" / "x", b"")
        with pytest.raises(leases.StepGoneError):
            lease(root.final(1))
        with removing(root, [2], NOW):
            lease(root.final(1))
        assert lease_files(root) == []


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in pathlib.Path(directory).rglob("*")
        if path.is_file()
    }


def test_what_a_replaced_start_still_uploads_in_place_does_not_count(
    tmp_path, monkeypatch
):
    hosts = uploaded.hosts(4)
    path = storage.absolute(tmp_path / "steps")
    root = persistent_root.PersistentRoot(path=path, in_place=True)

    starts = []

    def claimed(save):
        starts.append(begin(root.path, save))
        starts[-1].claim(line_of(save))
        return uploaded.saved_step(save=save)

    old = claimed("8")
    # The first of them has a successor of the same name, the last has none.
    monkeypatch.setattr(clock, "sleep", lambda _: None)
    late = [upload.Upload(root, old, host, claim=1) for host in (hosts[0], hosts[3])]
    *chunks, file, _ = uploaded.items(old)
    path = old.contents.leaves[file[0]].path
    for each in late:
        each.begin()
        uploaded.put(each, old, chunks[0], seed=1)
    # What it would write last.
    last = late[1].finish()
    storage.remove(root.final(5) / "manifest-m3.0")
    new = claimed("9")
    # Its file gives way to that of the start that continues.
    storage.write_atomic(root.final(5) / path, b"of a replaced start")
    uploaded.write_all(root, new, hosts[:3])
    uploaded.commit_all(root, new)
    committed = contents(root.final(5))
    # The commit has removed its store.
    with pytest.raises(errors.CheckpointError, match="NOT_FOUND"):
        uploaded.put(late[0], old, chunks[1], seed=1)
    with pytest.raises(errors.ReplacedError, match="as world 2"):
        late[0].write([upload.Part(*file, b"")], [np.zeros(7, np.uint8)])
    # One that begins only now has the claim that its driver had.
    for each in [*late, upload.Upload(root, old, hosts[1], claim=1)]:
        with pytest.raises(errors.ReplacedError, match="as world 2"):
            each.finish()
    # It was about to write when the other one began.
    storage.write_atomic(root.final(5) / "manifest-m3.0", last.to_bytes())
    now = contents(root.final(5))
    assert {name: now[name] for name in committed} == committed
    # Its name is the first of all manifests.
    late_manifest = root.final(5) / "manifest-m3.0"
    storage.rename(late_manifest, root.final(5) / "manifest-a")
    assert root.save_of(5, run=uploaded.RUN) == "9"
    assert not root.is_pending(StepId(5, "9"), run=uploaded.RUN)
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    (held,) = tier.held(line_of("9"))
    assert (held.complete, held.step) == (True, 5)


def test_a_renewal_of_a_record_that_is_lost_is_not_told(tmp_path):
    told, there = [], records.Records(storage.absolute(tmp_path))
    record = records.Record(start="a", process=process.this(), secs=600.0)
    held = there.take(1, record, renewed=told.append)
    held.renew()
    after = there.take(2, dataclasses.replace(record, start="b"))
    held.renew()
    assert told == [1]
    assert held.is_lost
    for each in (held, after):
        each.give_back()


def test_a_record_that_could_not_be_given_back_is_not_tried_again(
    tmp_path, monkeypatch
):
    record = records.Record(start="a", process=process.this(), secs=600.0)
    held = records.Records(storage.absolute(tmp_path)).take(1, record)

    def fail(*_, **__):
        raise RuntimeError("the client of the store is closed")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_atomic", fail)
        with pytest.raises(RuntimeError, match="is closed"):
            held.give_back()
    held.give_back()
    assert records.read(held.path).secs == 600.0


DAY = 24 * 3600.0


def seen(url, days_ago=0):
    return run_files.Seen(url, DAY * (1000 - days_ago))


class TestAgents:
    """The record of a run's agents, in storage and in each RAM disk."""

    def test_each_world_replaces_it_and_one_without_agents_has_none(self, tmp_path):
        assert run_files.read_agents(tmp_path) is None
        old = {
            "m1": seen("http://a", 3),
            "m2": seen("http://b"),
            "m3": seen("http://c"),
        }
        for these in (old, {"m1": seen("http://d")}):
            agents = RunAgents("mine", these)
            run_files.write_agents(tmp_path, agents)
            assert run_files.read_agents(tmp_path) == agents
        assert RunAgents("mine", old).urls == {"m2": "http://b", "m3": "http://c"}
        run_files.forget_agent(tmp_path, "http://e")
        run_files.forget_agent(tmp_path, "http://d")
        assert run_files.read_agents(tmp_path) is None

    def test_an_altered_record_is_an_error_in_storage_and_none_in_ram(self, tmp_path):
        run_files.write_agents(
            tmp_path, RunAgents("mine", {"m1": seen("http://a:8470")})
        )
        path = tmp_path / run_files.AGENTS
        for content in (path.read_bytes().replace(b"8470", b"8471"), b"", b"[1]"):
            path.write_bytes(content)
            with pytest.raises(
                errors.CheckpointError, match="restore the file from a copy"
            ):
                run_files.read_agents(tmp_path)
            assert run_files.known_agents(tmp_path) == {}

    def test_of_an_agent_that_moved_the_last_place_counts_for_two_weeks(self):
        old, new = {"m1": seen("http://a", 3)}, {"m1": seen("http://b", 2)}
        now_secs = 1000 * DAY
        for recorded in ([old, new], [new, old]):
            assert run_files.joined_agents(recorded, {}, now_secs=now_secs) == new
        agents = run_files.joined_agents(
            [old, new], {"m1": "http://c"}, now_secs=now_secs
        )
        assert agents == {"m1": seen("http://c")}
        recorded = [{"m1": seen("http://a", 13), "m2": seen("http://b", 15)}]
        joined = run_files.joined_agents(recorded, {}, now_secs=now_secs)
        assert list(joined) == ["m1"]
