"""What `status` and `report` show of a run: its state, its losses, its plots."""

import functools
import os
import re
import socket
import types
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.cli import status as verb
from elastic_ckpt.core import metrics, storage
from elastic_ckpt.inspect import page, run_files, status
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.tiers import find, source
from elastic_ckpt.training import report
from tests.tiers import saved_worlds

VALUES = st.floats(-1e9, 1e9, allow_nan=False) | st.integers(-5, 5).map(float)
record = functools.partial(
    report.RunRecords,
    **{"run": "<r>", "directory": "runs/r", "phase": "finished", "files": {}},
    **{"audit": "No audit.", "made_secs": 0.0},
)
TIERS = [
    status.NewestStep(tier="local", step=30, time_ms=110_000),
    status.NewestStep(tier="persistent", step=20, time_ms=90_000),
]
LOSSES = [
    status.AfterLoss(domain="slice", name=name, step=step)
    for name, step in (("0", 20), ("1", None), ("2", 20))
]
OTHERS = {"is_alive": True, "tiers": TIERS, "losses": LOSSES, "uncommitted": [40]}
at = functools.partial(status.status, **{"files": {}, **OTHERS})


def event(name, **fields):
    return {"event": name, "time": 120.0, **fields}


def line(metric, value, time=111.0):
    values = {"last": value, "sum": value}
    return {"metric": metric.name, "time": time, "step": 30, **values}


STARTED = event("run_started", time=100.0, steps=90, hosts=4, slices=2, devices=8)
FILES = {
    "run": [line(metrics.TRAIN_STEPS, 30), line(metrics.TRAIN_LOSS, 1.5)],
    "host-0": [line(metrics.TRAIN_STEP_RATE, 0.5), line(metrics.DATA_WAIT, 0.5)],
    "host-1": [line(metrics.TRAIN_STEPS, 7, 50.0), line(metrics.DATA_WAIT, 1.0)],
    "steps": [line(metrics.TRAIN_STEP, 2.0, time) for time in (40.0, 111.0)],
}


def test_last_event_of_a_phase_names_it():
    for events, phase in (
        ([], "not started"),
        ([STARTED], "restoring"),
        ([STARTED, event("compile_started")], "compiling"),
        ([STARTED, event("compiled"), event("saved", step=4)], "training"),
    ):
        assert at(events).phase == phase
    content = at([STARTED, event("compiled")], is_alive=False)
    assert content.phase.startswith("not running")
    assert content.hosts is content.slices is content.devices is None
    ended = [STARTED, event("run_finished", step=9)]
    assert at(ended, is_alive=False).phase == "finished"


def test_nothing_of_an_older_step_or_start_is_shown_as_of_the_present_one():
    later = at([STARTED, event("save_started", step=31)], files=FILES)
    assert (later.step, later.loss, later.steps_per_sec) == (31, None, 0.5)
    later = at([{**STARTED, "time": 115.0}], files=FILES, tiers=())
    assert (later.step, later.loss, later.steps_per_sec) == (30, 1.5, None)
    assert later.data_wait_percent is None


def test_screen_has_all_of_it():
    validated = functools.partial(event, "validated", level="tensor")
    differ = functools.partial(event, "replicas_differ", step=20, hosts=[1])
    found = [differ(leaf="w", is_certain=True), differ(leaf="b", is_certain=False)]
    told = "differed at step 20: w at hosts 1, b at hosts 1 (which of them is unknown)"
    full = event("degraded", tier="persistent", step=30, cause="full", why="no room")
    for events, lines in (
        ([validated(step=10), validated(step=20)], ["equal at step 20 (tensor)"]),
        ([*found, validated(step=20), full], ["DIFFER at step 20 (tensor)", told]),
        ([*found, full, validated(step=1000)], ["equal at step 1,000 (tensor)", told]),
    ):
        # A backup that failed is told until one succeeds.
        why = ", FAILED: full: no room" * (events[-1] is full)
        last = event("saved" if why else "backed_up", step=30)
        content = at([STARTED, *events, last], files=FILES)
        assert verb.describe(content, now=131.0).splitlines() == [
            "run: restoring",
            # In the last minute, at the host that waits longest.
            "step       30 of 90 (20 s ago), loss 1.5000",
            "rate       0.5 steps/s, 50.0% waiting for data",
            "hosts      4 alive, in 2 slices, 8 devices",
            "in RAM     step 30, 21 s old",
            "in storage step 20, 41 s old",
            "backup     10 steps behind RAM, being written, or interrupted: step 40"
            + why,
            "if lost    slices 0, 2: each restores step 20, 10 steps to retrain",
            "if lost    slice 1: the run would start over",
            *(f"replicas   {each}" for each in lines),
            f"last event 11 s ago: {last['event']} step=30",
        ]


def test_run_lives_while_its_lock_is_held_whoever_has_its_process_number(tmp_path):
    lock = tmp_path / run_files.LOCK
    assert run_files.is_alive(tmp_path) is run_files.is_alive("gs://bucket/run") is None
    with storage.exclusive_lock(lock):
        assert run_files.is_alive(tmp_path) is True
    # The run was killed, and another program has its number.
    lock.write_text(f"process {os.getppid()} on {socket.gethostname()}\n")
    assert run_files.is_alive(tmp_path) is False
    lock.write_text("process 1 on another-machine\n")
    assert run_files.is_alive(tmp_path) is None


@given(st.data())
def test_loss_costs_what_a_search_without_that_host_or_slice_finds(data):
    tier = st.sampled_from(["local", "local", "persistent"])
    worlds = [data.draw(saved_worlds.saved(most_hosts=4, step=n)) for n in (10, 20)]
    manifests = [each.at(data.draw(tier)) for world in worlds for each in world]
    in_ram = [each for each in manifests if each.holders[0].tier == "local"]
    stored = [each for each in manifests if each not in in_ram]

    def looked(left):
        held = [source.HeldParts(each, None) for each in left]
        return find.looked(source.Offered(held, [])).saves

    def newest(left):
        return next((e.step_id.step for e in looked(left) if not e.problem), None)

    def domains(each):
        return {("host", str(each.host.number)), *each.host.domains.items()}

    newest_steps = status.newest_steps(looked(manifests))
    assert [each.step for each in newest_steps] == [newest(in_ram), newest(stored)]
    losses = status.after_losses(looked(manifests))
    assert {(each.domain, each.name): each.step for each in losses} == {
        lost: newest(stored + [each for each in in_ram if lost not in domains(each)])
        for lost in set().union(*map(domains, manifests))
    }


# Vega draws in a tenth of a second.
@settings(max_examples=6)
@given(
    points=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40),
    kind=st.sampled_from(["line", "steps", "area", "dots"]),
    is_log=st.booleans(),
)
def test_every_point_is_drawn_within_the_frame(points, kind, is_log):
    points = [(x, abs(y) + 1e-3 if is_log else y) for x, y in points]
    series = page.Series(name="s", points=sorted(points), kind=kind)
    spec = page.lines([series], x="x", y="y", is_log=is_log, from_zero=not is_log)
    root = ElementTree.fromstring(page.svg(spec, title="a < b"))
    width, height = map(float, root.get("viewBox").split()[2:])
    assert (width, root.get("aria-label")) == (page.WIDTH, "a < b")
    paths = [each.attrib for each in root.iter() if each.tag.endswith("}path")]
    drawn = [p for p in paths if page.COLORS[0] in (p.get("stroke"), p.get("fill"))]
    assert len(drawn) == len(points) if kind == "dots" else drawn
    for path in drawn if kind != "dots" else ():
        numbers = [*map(float, re.findall(r"-?[0-9.]+(?:e-?\d+)?", path["d"]))]
        assert -1 <= min(numbers[::2]) <= max(numbers[::2]) <= width
        assert -1 <= min(numbers[1::2]) <= max(numbers[1::2]) <= height


def test_losses_are_drawn_at_their_steps_and_those_trained_again_do_not_count():
    def attempt(start_step, steps):
        logged = [types.SimpleNamespace(step=n, loss=float(n)) for n in steps]
        return types.SimpleNamespace(start_step=start_step, records=logged)

    # A segment with the steps 3 to 5 of the first attempt is missing.
    first = attempt(0, [0, 1, 2, *range(6, 12)])
    attempts = [first, attempt(10, []), attempt(8, [8])]
    counted = record(events=[], attempts=attempts)
    assert sorted(counted.lineage) == [0, 1, 2, 6, 7, 8]
    steps = [0, 1, 2, 6, 7, 8]
    assert counted.losses(is_counted=True) == [(n + 1, n) for n in steps]
    assert counted.losses(is_counted=False) == [(n + 1, n) for n in range(8, 12)]


def test_interruption_is_shown_with_its_evidence_and_what_it_cost():
    cause = {"kind": "slice_lost", "what": "slice", "which": "1", "why": "lost"}
    cause |= {"evidence": ["host 1: killed", "no memory"], "action": "leave out"}
    judged = event("verdict", time=60.0, step=30, phase="train", since=59.0, **cause)
    survived = judged | {"time": 150.0, "what": "storage", "which": "", "why": "full"}
    back = event("recovered", time=90.0, world=2, steps_lost=5, secs=7.0)
    back |= {f"{phase}_secs": 1.0 for phase in goodput.PHASES}
    began = event("world_started", time=0.0, slices=[0], spares=[])
    told = report.report(record(events=[began, judged, back, survived], attempts=[]))
    told = told.replace("</td><td>", "|")
    assert "1.00|slice 1|lost|host 1: killed; no memory|leave out|7.0 s|5" in told
    assert "2.50|storage|full|host 1: killed; no memory|leave out|||" in told
    # A loop need not know how many steps it will take.
    started = {**STARTED, "steps": None, "start_step": 0}
    assert "Nothing failed." in report.report(record(events=[started], attempts=[]))
