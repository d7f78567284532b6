"""Records beside the steps in storage: who writes, who reads, and who serves."""

import contextlib
import dataclasses
import gc
import subprocess
import sys
import threading
from unittest import mock

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
from tests.tiers import served, uploaded

LOST = pytest.raises(errors.CheckpointError, match="was lost during the read")
OLD, NOW = (f"{number:015d}" for number in (5, 6))


def line_of(save):
    return Line(save=save, parents=((40, "7"),))


@pytest.fixture
def root(tmp_path):
    return persistent_root.PersistentRoot.from_path(tmp_path / "steps")


def committed(root, *steps, save=OLD):
    """Directories of steps of ours, without values."""
    for step in steps:
        storage.write_atomic(root.final(step) / "manifest-0", b"")
        content = persistent_root.commit_text(root.final(step), uploaded.RUN, save)
        storage.write_atomic(root.final(step) / persistent_root.COMMIT_FILE, content)


def begin(steps, name="a", **claimant):
    """A world of a start of a run that a launcher starts."""
    start = claims.Claimant(name=name, **claimant)
    write_claim = claims.WriteClaim(steps, run="tiny", claimant=start)
    write_claim.begin()
    return write_claim


@pytest.mark.parametrize("place", ["local", "gs", "s3"])
def test_a_replaced_start_claims_and_commits_no_more(place, steps_in):
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
    assert [claims.is_replaced(steps, number) for number in (1, 2)] == [True, False]
    claims.check(steps, 2)
    new.close()
    with pytest.raises(errors.CheckpointError, match="was closed before"):
        claims.check(steps, 2)


def test_a_start_claims_each_of_its_worlds_also_if_lists_lag(tmp_path, monkeypatch):
    begin(tmp_path).claim(line_of("8"))
    assert begin(tmp_path, has_claimed=True).claim(line_of("9")) == 2
    second = claims.newest(tmp_path)
    assert not claims.is_replaced(tmp_path, 1)
    # Another start, whose search was before that, has lost.
    other = begin(tmp_path, "b")
    with pytest.raises(errors.ReplacedError):
        other.claim(line_of("9"))
    assert other.claim(line_of("95")) == 3
    newest = claims.newest(tmp_path)
    assert (newest.number, newest.begun_ms) == (3, second.begun_ms)
    # As in a bucket.
    monkeypatch.setattr(storage, "is_local", lambda _: False)
    monkeypatch.setattr(storage, "names", lambda _: ["1.json"])
    assert claims.newest(tmp_path) == newest
    away = mock.Mock(side_effect=OSError(5, "storage is away"))
    monkeypatch.setattr(storage, "names", away)
    with pytest.raises(errors.CheckpointError, match="unreachable"):
        claims.newest(tmp_path)


def test_a_claim_counts_though_its_answer_was_lost(tmp_path, monkeypatch):
    create, write = storage.create, storage.write_atomic

    def twice(*each, **options):
        create(*each, **options)
        return create(*each, **options)

    def lose(path, content, **options):
        write(path, content, **options)
        raise OSError(5, "the answer is lost", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", twice)
        write_claim = begin(tmp_path)
        patch.setattr(storage, "write_atomic", lose)
        with pytest.raises(errors.CheckpointError, match="the answer is lost"):
            write_claim.claim(line_of("8"))
    assert claims.newest(tmp_path).line == line_of("8")
    assert write_claim.claim(line_of("8")) == 1


def test_a_dropped_writer_gives_its_claim_back_in_a_thread(tmp_path, monkeypatch):
    threads, release = [], records.Held.release

    def noted(held):
        release(held)
        # Garbage of other tests may be collected, too.
        if held.path.is_relative_to(tmp_path):
            threads.append(threading.current_thread())

    monkeypatch.setattr(records.Held, "release", noted)
    write_claim = begin(tmp_path)
    del write_claim
    gc.collect()
    served.until(lambda: threads)
    assert threads != [threading.current_thread()]
    assert begin(tmp_path, "b").number == 2


def test_a_lost_record_is_not_renewed(tmp_path, monkeypatch, caplog):
    told, there = [], records.RecordStore(storage.absolute(tmp_path))
    record = records.Record(start="a", process=process.this(), secs=600.0)
    held = there.take(1, record, renewed=told.append)
    held.renew()
    after = there.take(2, dataclasses.replace(record, start="b"))
    held.renew()
    assert (told, held.is_lost) == ([1], True)
    for each in (held, after):
        each.release()
    # Storage that is away is logged; what a closed client raises is the caller's.
    away, closed = OSError(5, "storage is away"), RuntimeError("the client is closed")
    for number, problem in ((3, away), (4, closed)):
        held = there.take(number, record)
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            patch.setattr(storage, "write_atomic", mock.Mock(side_effect=problem))
            held.release()
            assert problem is away
        held.release()
        assert records.read(held.path).secs == 600.0
    assert "was not written: " in caplog.text


@pytest.fixture
def first(root):
    """The directory of the first of two steps, which is ours."""
    storage.make_directory(root.final(2))
    committed(root, 1)
    return root.final(1)


def lease_files(root):
    return sorted((root.path / leases.DIRECTORY).iterdir())


def test_a_step_is_leased_while_the_block_runs(root, first):
    with leases.lease(first) as path:
        assert path == first
        with leases.lease(first), leases.lease(root.final(2)):
            assert leases.leased(root, {}) == {1, 2}
        # A removal sees it, announced before or after.
        with leases.removing(root, [1], line_of(NOW), watch={}) as leased:
            assert leased == leases.leased(root, {}) == {1}
    # Also by the path of a part; but not a step of another program.
    for path, steps in ((first, {1}), (first / "state", {1}), (root.final(2), set())):
        with leases.leased_if_ours(path):
            assert leases.leased(root, {}) == steps
    for lose in (lambda: committed(root, 1, save=NOW), lambda: storage.remove(first)):
        with LOST, leases.lease(first):
            lose()
    assert lease_files(root) == []


def test_a_step_that_is_removed_or_not_there_is_not_leased(root, first, tmp_path):
    why = "being removed; pass PERSISTENT_DIRECTORY"
    gone = pytest.raises(leases.StepGoneError, match=why)
    # The world that announced it is killed then.
    killed = leases.removing(root, [1], line_of(OLD), watch={})
    killed.__enter__()
    for path in (first, root.final(3), tmp_path / "other"):
        with gone, leases.lease(path):
            pass
    removing = leases.removing(root, [2], line_of(NOW), watch={})
    with removing, leases.lease(first), gone, leases.lease(root.final(2)):
        pass
    assert lease_files(root) == []


def test_a_lease_expires_by_the_clock_of_the_remover(root, first, monkeypatch):
    now_secs, watch = 0.0, {}
    monkeypatch.setattr(clock, "monotonic", lambda: now_secs)
    # Its holder finds that it was lost.
    with LOST, leases.lease(first, duration_secs=100.0):
        (path,) = lease_files(root)
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


def test_a_lease_is_renewed_and_ends_with_a_killed_process(root, first, monkeypatch):
    # Often, and yet not lost where a thread waits for seconds.
    monkeypatch.setattr(records, "_RENEWALS", 10_000)
    contents = set()
    with leases.lease(first, duration_secs=600.0):
        (path,) = lease_files(root)
        served.until(lambda: contents.add(path.read_bytes()) or len(contents) == 3)
        assert leases.leased(root, {}) == {1}
    leased = f"import os, elastic_ckpt as ec\nwith ec.lease({str(first)!r}):"
    command = [sys.executable, "-c", f"{leased} os.kill(os.getpid(), 9)"]
    assert subprocess.run(command, check=False).returncode == -9
    assert len(lease_files(root)) == 1
    assert leases.leased(root, {}) == set()
    assert lease_files(root) == []


def test_uploads_of_a_replaced_start_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "sleep", lambda _: None)
    path, world, starts = storage.absolute(tmp_path / "steps"), uploaded.hosts(4), []
    root = persistent_root.PersistentRoot(path=path, in_place=True)

    def claimed(save):
        starts.append(begin(path, save))
        starts[-1].claim(line_of(save))
        return uploaded.saved_step(save=save)

    old = claimed("8")
    *chunks, file, _ = uploaded.items(old)
    # The first of them has a successor of the same name, the last has none.
    late = [upload.Upload(root, old, host, claim=1) for host in (world[0], world[3])]
    for each in late:
        each.begin()
        uploaded.put(each, old, chunks[0], seed=1)
    # What it would write last.
    last = late[1].finish()
    storage.remove(root.final(5) / "manifest-m3.0")
    new = claimed("9")
    # Its file gives way to that of the start that continues.
    of_file = root.final(5) / old.contents.leaves[file[0]].path
    storage.write_atomic(of_file, b"of a replaced start")
    uploaded.write_all(root, new, world[:3])
    uploaded.commit_all(root, new)
    tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
    uploaded.read(tier, new)
    # The commit has removed its store.
    with pytest.raises(errors.CheckpointError, match="NOT_FOUND"):
        uploaded.put(late[0], old, chunks[1], seed=1)
    replaced = pytest.raises(errors.ReplacedError, match="as world 2")
    with replaced:
        late[0].write([(*file, b"")], [np.zeros(7, np.uint8)])
    # One that begins only now has the claim that its driver had.
    for each in [*late, upload.Upload(root, old, world[1], claim=1)]:
        with replaced:
            each.finish()
    uploaded.read(tier, new)
    # It was about to write when the other one began, and its name is the first of all.
    storage.write_atomic(root.final(5) / "manifest-a", last.to_bytes())
    assert root.save_of(5, run=uploaded.RUN) == "9"
    assert not root.is_pending(StepId(5, "9"), run=uploaded.RUN)
    (held,) = tier.held(line_of("9"))
    assert (held.complete, held.step) == (True, 5)


def test_each_world_replaces_the_agents_and_places_count_two_weeks(tmp_path):
    day = 24 * 3600.0

    def seen(url, days_ago=0):
        return run_files.Seen(url, day * (1000 - days_ago))

    assert run_files.read_agents(tmp_path) is None
    old = {"m1": seen("http://a", 3), "m2": seen("http://b"), "m3": seen("http://c")}
    for these in (old, {"m1": seen("http://d")}):
        agents = run_files.RunAgents("mine", these)
        run_files.write_agents(tmp_path, agents)
        assert run_files.read_agents(tmp_path) == agents
    urls = run_files.RunAgents("mine", old).urls
    assert urls == {"m2": "http://b", "m3": "http://c"}
    for url, left in (("http://e", these), ("http://d", {})):
        run_files.forget_agent(tmp_path, url)
        assert run_files.known_agents(tmp_path) == left
    (tmp_path / run_files.AGENTS).write_bytes(b"damaged")
    assert run_files.known_agents(tmp_path) == {}

    def joined(*recorded, **present):
        return run_files.joined_agents(recorded, present, now_secs=1000 * day)

    old, new = {"m1": seen("http://a", 3)}, {"m1": seen("http://b", 2)}
    assert joined(old, new) == joined(new, old) == new
    assert joined(old, new, m1="http://c") == {"m1": seen("http://c")}
    two = {"m1": seen("http://a", 13), "m2": seen("http://b", 15)}
    assert list(joined(two)) == ["m1"]


def test_evaluations_count_for_their_line_and_go_with_their_step(root):
    def record(step, loss, *, save=OLD, run=uploaded.RUN):
        text = f'{{"loss":{loss}}}'
        each = run_files.Evaluation(run=run, step=step, save=save, metrics=text)
        run_files.record_evaluation(root, each)

    def counted(line):
        tier = persistent_tier.PersistentTier(root, run=uploaded.RUN)
        return {each.step: each.metrics for each in tier.held(line)}

    def recorded():
        return sorted(each.name[:-5] for each in (root.path / "evaluations").iterdir())

    committed(root, 2, 5, 7)
    for step in (2, 5):
        metrics = root.final(step) / "metrics" / "metrics"
        storage.write_atomic(metrics, b'{"loss":9,"other":1}')
    old, new = Line(save=OLD, parents=()), Line(save=NOW, parents=((5, OLD),))
    # One before all saved steps counts for none.
    for step, loss in ((1, 0), (3, 0.3), (5, 8), (5, 0.5), (9, 0.9), (8, 0.8)):
        record(step, loss)
    record(5, 7, run="another", save=NOW)
    # Metrics of a save count unless the step itself was evaluated later; otherwise the
    # nearest evaluation counts, and the later one of the same step.
    kept = {2: {"loss": 9, "other": 1}, 5: {"loss": 0.5, "other": 1}}
    assert counted(old) == {**kept, 7: {"loss": 0.8}}
    # The run went back to step 5, and goes on under a newer save. Nor does the old
    # world count those of the new one, or remove them.
    assert counted(new) == {**kept, 7: None}
    record(8, 0.7, save=NOW)
    assert counted(new) == {**kept, 7: {"loss": 0.7}}
    assert counted(old) == {**kept, 7: {"loss": 0.8}}
    run_files.forget_evaluations(root, {2, 5}, old)
    left = [f"1-{OLD}", f"5-{NOW}", f"8-{OLD}", f"8-{NOW}", f"9-{OLD}"]
    assert recorded() == left
    # Those that the new line has passed go.
    record(7, 0.1)
    run_files.forget_evaluations(root, (), new)
    assert recorded() == left
