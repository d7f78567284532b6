"""The status of a run, from its events, metrics and manifests."""

from elastic_ckpt.cli import status as verb
from elastic_ckpt.core import metrics
from elastic_ckpt.inspect import status

STARTED = {
    "event": "run_started", "run": "r", "hosts": 4, "slices": 2, "devices": 8,
    "start_step": 0, "steps": 90, "time": 100.0,
}  # fmt: skip
TIERS = (
    status.NewestStep(tier="local", step=30, time_ms=110_000),
    status.NewestStep(tier="persistent", step=20, time_ms=90_000),
)
LOSSES = tuple(
    status.AfterLoss(domain="slice", name=name, step=step)
    for name, step in (("0", 20), ("1", None), ("2", 20))
)


def event(name, **fields):
    return {"event": name, "time": 120.0, **fields}


def line(metric, value, time, step=29):
    of_value = {"last": value, "sum": value, "time": time, "step": step}
    return {"metric": metric.name, **of_value}


def at(*events, is_alive=True, files=None, tiers=TIERS):
    return status.status(
        events,
        files or {},
        is_alive=is_alive,
        tiers=tiers,
        losses=LOSSES,
        uncommitted=[40],
    )


def test_last_event_of_a_phase_names_it():
    for events, phase in (
        ([], "not started"),
        ([STARTED], "restoring"),
        ([STARTED, event("compile_started")], "compiling"),
        ([STARTED, event("compiled"), event("saved", step=4)], "training"),
        ([STARTED, event("waiting_for_slices")], "waiting for slices"),
        ([STARTED, event("run_failed")], "failed"),
    ):
        assert at(*events).phase == phase
    content = at(STARTED, event("compiled"), is_alive=False)
    assert content.phase.startswith("not running")
    assert content.hosts is content.slices is content.devices is None
    ended = at(STARTED, event("run_finished", step=9), is_alive=False, tiers=())
    assert (ended.phase, ended.step) == ("finished", 9)


def test_newest_value_of_each_metric_counts_whichever_file_it_is_in():
    files = {
        "run": [
            line(metrics.TRAIN_STEPS, 29, 111.0),
            line(metrics.TRAIN_STEP, 2.0, 40.0),
            line(metrics.TRAIN_STEP, 2.0, 111.0),
            line(metrics.TRAIN_LOSS, 1.5, 111.0),
        ],
        "host-00000": [
            line(metrics.TRAIN_STEPS, 7, 50.0),
            line(metrics.DATA_WAIT, 0.5, 111.0),
        ],
        "host-00001": [line(metrics.DATA_WAIT, 1.0, 111.0)],
    }
    content = at(STARTED, files=files, tiers=())
    assert (content.step, content.steps, content.loss) == (29, 90, 1.5)
    # In the last minute, at the host that waits longest.
    assert content.data_wait_percent == 50.0
    later = at(STARTED, event("save_started", step=31), files=files)
    assert later.step == 31


def test_nothing_of_an_older_step_or_start_is_shown_as_of_the_present_one():
    files = {
        "run": [
            line(metrics.TRAIN_STEPS, 29, 90.0),
            line(metrics.TRAIN_STEP, 2.0, 90.0),
            line(metrics.DATA_WAIT, 1.0, 90.0),
            *(
                line(metric, 1.5, 90.0)
                for metric in (
                    metrics.TRAIN_LOSS,
                    metrics.TRAIN_LEARNING_RATE,
                    metrics.TRAIN_STEP_RATE,
                    metrics.TRAIN_TOKEN_RATE,
                    metrics.GOODPUT,
                )
            ),
        ]
    }
    content = at(STARTED, event("save_started", step=31), files=files)
    assert (content.step, content.loss, content.learning_rate) == (31, None, None)
    assert content.steps_per_sec is content.tokens_per_sec is None
    assert content.goodput_percent is content.data_wait_percent is None
    before = at({**STARTED, "time": 80.0}, files=files, tiers=())
    assert (before.step, before.loss, before.steps_per_sec) == (29, 1.5, 1.5)


def test_backlog_is_what_storage_lacks_and_why():
    refused = event("degraded", tier="persistent", step=30, cause="full", why="no room")
    content = at(STARTED, refused)
    assert (content.steps_behind, content.being_written) == (10, (40,))
    assert (content.backup_failed, content.backup_cause) == ("no room", "full")
    later = at(STARTED, refused, event("backed_up", step=30))
    assert later.backup_failed is later.backup_cause is None


def test_screen_has_the_newest_replicas_that_differ():
    def differ(step, leaf, *, is_certain=True):
        fields = {"hosts": [1], "is_certain": is_certain, "why": "they do"}
        return event("replicas_differ", step=step, leaf=leaf, **fields)

    def validated(step):
        return event("validated", step=step, level="tensor")

    for events, lines in (
        ([validated(10), validated(20)], ["equal at step 20 (tensor)"]),
        (
            [validated(10), differ(20, "w"), differ(20, "b"), validated(20)],
            [
                "DIFFER at step 20 (tensor)",
                "differed at step 20: w at hosts 1, b at hosts 1",
            ],
        ),
        (
            [differ(20, "w", is_certain=False), validated(20), validated(1000)],
            [
                "equal at step 1,000 (tensor)",
                "differed at step 20: w at hosts 1 (which of them is unknown)",
            ],
        ),
    ):
        screen = verb.describe(at(STARTED, *events), now=131.0).splitlines()
        shown = [line for line in screen if line.startswith("replicas")]
        assert shown == [f"replicas   {line}" for line in lines]


def test_screen_has_all_of_it():
    files = {"run": [line(metrics.TRAIN_STEPS, 33, 111.0)]}
    content = at(STARTED, event("saved", step=30, secs=0.5), files=files)
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
        "last event 11 s ago: saved step=30 secs=0.5",
    ]
