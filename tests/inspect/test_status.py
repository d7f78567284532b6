"""The status of a run, from its events, metrics and manifests."""

import functools

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.cli import status as verb
from elastic_ckpt.core import metrics
from elastic_ckpt.inspect import status
from elastic_ckpt.tiers import find, source
from tests.tiers import saved_worlds

STARTED = {
    "event": "run_started", "run": "r", "hosts": 4, "slices": 2, "devices": 8,
    "start_step": 0, "steps": 90, "time": 100.0,
}  # fmt: skip
at = functools.partial(
    status.status,
    files={},
    is_alive=True,
    tiers=(
        status.NewestStep(tier="local", step=30, time_ms=110_000),
        status.NewestStep(tier="persistent", step=20, time_ms=90_000),
    ),
    losses=[
        status.AfterLoss(domain="slice", name=name, step=step)
        for name, step in (("0", 20), ("1", None), ("2", 20))
    ],
    uncommitted=[40],
)


def event(name, **fields):
    return {"event": name, "time": 120.0, **fields}


def line(metric, value, time=111.0):
    of_value = {"last": value, "sum": value, "time": time, "step": 29}
    return {"metric": metric.name, **of_value}


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
    ended = at([STARTED, event("run_finished", step=9)], is_alive=False, tiers=())
    assert (ended.phase, ended.step) == ("finished", 9)


def test_newest_value_of_each_metric_counts_whichever_file_it_is_in():
    of_run = [line(metrics.TRAIN_STEPS, 29), line(metrics.TRAIN_LOSS, 1.5)]
    of_run += [line(metrics.TRAIN_STEP, 2.0, time) for time in (40.0, 111.0)]
    of_run += [line(metrics.TRAIN_STEP_RATE, 0.5), line(metrics.DATA_WAIT, 0.5)]
    other = [line(metrics.TRAIN_STEPS, 7, 50.0), line(metrics.DATA_WAIT, 1.0)]
    show = functools.partial(at, files={"run": of_run, "host-00001": other})
    content = show([STARTED], tiers=())
    assert (content.step, content.steps, content.loss) == (29, 90, 1.5)
    # In the last minute, at the host that waits longest.
    assert (content.steps_per_sec, content.data_wait_percent) == (0.5, 50.0)
    # Nothing of an older step or start is shown as of the present one.
    later = show([STARTED, event("save_started", step=31)])
    assert (later.step, later.loss, later.steps_per_sec) == (31, None, 0.5)
    later = show([{**STARTED, "time": 115.0}], tiers=())
    assert (later.step, later.loss, later.steps_per_sec) == (29, 1.5, None)
    assert later.data_wait_percent is None


def test_backlog_is_what_storage_lacks_and_why():
    refused = event("degraded", tier="persistent", step=30, cause="full", why="no room")
    content = at([STARTED, refused])
    assert (content.steps_behind, content.being_written) == (10, (40,))
    assert (content.backup_failed, content.backup_cause) == ("no room", "full")
    later = at([STARTED, refused, event("backed_up", step=30)])
    assert later.backup_failed is later.backup_cause is None


def test_screen_has_all_of_it_with_the_newest_replicas_that_differ():
    validated = {n: event("validated", step=n, level="tensor") for n in (10, 20, 1000)}
    differ = functools.partial(event, "replicas_differ", step=20, hosts=[1])
    found = [differ(leaf="w", is_certain=True), differ(leaf="b", is_certain=False)]
    of_found = (
        "differed at step 20: w at hosts 1, b at hosts 1 (which of them is unknown)"
    )
    for compared, lines in (
        ([validated[10], validated[20]], ["equal at step 20 (tensor)"]),
        ([*found, validated[20]], ["DIFFER at step 20 (tensor)", of_found]),
        ([*found, validated[1000]], ["equal at step 1,000 (tensor)", of_found]),
    ):
        content = at(
            [STARTED, *compared, event("saved", step=30, secs=0.5)],
            files={"run": [line(metrics.TRAIN_STEPS, 33)]},
        )
        assert verb.describe(content, now=131.0).splitlines() == [
            "r: restoring",
            "step       33 of 90 (20 s ago)",
            "rate       unknown",
            "hosts      4 alive, in 2 slices, 8 devices",
            "in RAM     step 30, 21 s old",
            "in storage step 20, 41 s old",
            "backup     10 steps behind RAM, being written, or cut short: step 40",
            "if lost    slices 0, 2: each restores step 20, 13 steps to train again",
            "if lost    slice 1: the run would begin anew",
            *(f"replicas   {each}" for each in lines),
            "last event 11 s ago: saved step=30 secs=0.5",
        ]


@given(st.data())
def test_loss_costs_what_a_search_without_that_host_or_slice_finds(data):
    tier = st.sampled_from(["local", "local", "persistent"])
    worlds = [data.draw(saved_worlds.saved(most_hosts=4, step=n)) for n in (10, 20)]
    manifests = [each.at(data.draw(tier)) for world in worlds for each in world]
    in_ram = [each for each in manifests if each.holders[0].tier == "local"]
    stored = [each for each in manifests if each not in in_ram]

    def looked(left):
        copies = [source.Copy(each, None) for each in left]
        return find.looked(source.Offered(copies, [])).saves

    def newest(left):
        whole = (each.step_id.step for each in looked(left) if not each.problem)
        return next(whole, None)

    def domains(each):
        return {("host", str(each.host.number)), *each.host.domains.items()}

    newest_steps = status.newest_steps(looked(manifests))
    assert [each.step for each in newest_steps] == [newest(in_ram), newest(stored)]
    losses = status.after_losses(looked(manifests))
    assert {(each.domain, each.name): each.step for each in losses} == {
        lost: newest(stored + [each for each in in_ram if lost not in domains(each)])
        for lost in set().union(*map(domains, manifests))
    }
