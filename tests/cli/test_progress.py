import io
import string

import pytest

from elastic_ckpt.core import events
from elastic_ckpt.monitoring import progress

RATES = {"tokens": 9, "learning_rate": 0.1}
STARTED = {
    "run": "first", "hosts": 1, "slices": 1, "devices": 2, "start_step": 0, "steps": 4,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(*events, log_period=1):
    stream = io.StringIO()
    shown = progress.Progress(log_period, stream)
    for name, fields in events:
        shown(name, **fields)
    return stream.getvalue().splitlines()


class Clock:
    def __init__(self):
        self.secs = 0.0

    def __call__(self):
        return self.secs


@pytest.fixture
def clock():
    return Clock()


RAM = dict.fromkeys(
    (
        *("local_bytes", "close_bytes", "distant_bytes", "persistent_bytes"),
        *("bad_copies", "repaired"),
    ),
    0,
)
FAILED = ("run_failed", {"step": 0, "why": "x"})


@pytest.mark.parametrize(
    ("events", "last"),
    [
        (
            [("step_interrupted", {"step": 8, "path": "/r/8.tmp", "resume_step": 4})],
            "the save of step 8 was interrupted, so the step is skipped (/r/8.tmp);"
            " the newest complete step is 4",
        ),
        # A run that is refused again and again does not begin.
        (
            [FAILED],
            "the run failed before it began; once the cause is fixed, the same"
            " command continues it from the newest complete step, if any",
        ),
        (
            [("run_started", STARTED), ("run_stopped", {"step": 3, "saved": False})],
            "stopped after step 3, which was NOT saved; the same command continues it"
            " from the newest complete step, if any",
        ),
        # A machine that has just taken the lead.
        (
            [("run_stopped", {"step": 0, "saved": False})],
            "stopped before it began; the same command continues it from the newest"
            " complete step, if any",
        ),
        (
            [("restored_from", RAM | {"step": 2, "bad_copies": 2, "repaired": 1})],
            "restored step 2; bad copies: 2, repaired: 1",
        ),
        (
            [("world_started", {"world": 2, "slices": [0, 2], "spares": [1]})],
            "world 2 starts on slices 0, 2, spare: 1",
        ),
        (
            [("scale_requested", {"slices": 1, "chosen": [3]})],
            "1 slice requested: the run moves to slices 3",
        ),
        (
            [("state_kept", {"step": 4, "device_bytes": 2**21, "secs": 0.1})],
            "kept step 4 in device memory: 2.0 MiB",
        ),
    ],
)
def test_event_is_a_line(events, last):
    assert lines_of(*events)[-1] == last


def test_full_storage_is_one_line_until_it_takes_steps_again():
    def degraded(step):
        path = f"gs://bucket/r/checkpoints/{step}.orbax-checkpoint-tmp-01/data/a.json"
        why = f"it was not backed up: writing {path} failed: No space left"
        fields = {"tier": "persistent", "step": step, "cause": "full", "why": why}
        return "degraded", fields

    recovered = {"step": 180, "cause": "full", "steps": 1, "secs": 1.0}
    first, told, second = lines_of(
        degraded(140), degraded(160), ("storage_recovered", recovered), degraded(200)
    )
    assert first.startswith("persistent tier, step 140: it was not backed up: ")
    assert first.endswith("No space left; free up space there, or keep fewer steps")
    assert told.startswith("storage accepts steps again")
    assert second.startswith("persistent tier, step 200: ")


def test_file_gets_a_line_each_log_period_and_a_terminal_one_that_moves(
    monkeypatch, clock
):
    def shown_in(stream):
        shown = progress.Progress(2, stream, clock=clock)
        shown("run_started", **STARTED)
        for step in range(1, 5):
            clock.secs += 0.5
            shown("step", step=step, steps=4, loss=2.0, secs=0.5, **RATES)
        shown("run_finished", step=4, secs=2.0)
        return stream.getvalue()

    assert shown_in(io.StringIO()) == (
        "first: to step 4 on 1 host, 1 slice, 2 devices\n"
        "step 2/4 | loss 2.0000 | 2.0 steps/s | 1 host, 1 slice, 2 devices\n"
        "step 4/4 | loss 2.0000 | 2.0 steps/s | 1 host, 1 slice, 2 devices\n"
        "finished at step 4 after 2.0 s\n"
    )
    monkeypatch.setenv("COLUMNS", "30")
    output = shown_in(Terminal())
    assert output.count("\r\033[K") == 4
    assert output.count("\n") == 3
    assert output.split("\r\033[K")[1] == "step 1/4 | loss 2.0000 | 1 ho"


def pass_secs(shown, clock, secs):
    """Lets time pass, with a look each half second."""
    for _ in range(2 * secs):
        clock.secs += 0.5
        shown.remind()


def test_each_phase_is_named_when_it_takes_long(clock):
    stream = io.StringIO()
    shown = progress.Progress(1, stream, clock=clock)
    pass_secs(shown, clock, 10)
    for name, fields in (
        ("host_lost", {"host": 1, "why": "killed"}),
        ("slice_lost", {"slice": 1, "why": "killed"}),
        ("waiting_for_slices", {"why": "1 usable", "within_secs": 60.0}),
        ("world_started", {"world": 2, "slices": [0, 2], "spares": []}),
        ("world_joined", {"world": 2}),
        ("run_started", STARTED | {"start_step": 2}),
        ("restored_from", {"step": 2, **RAM}),
        ("compile_started", {"step": 3}),
        ("compiled", {"step": 3, "secs": 5.0}),
        ("step", {"step": 4, "steps": 4, "loss": 2.0, "secs": 0.5, **RATES}),
    ):
        shown(name, **fields)
        # No silence is longer than 5 seconds.
        pass_secs(shown, clock, 5)
    reminders = [line for line in stream.getvalue().splitlines() if " now" in line]
    assert reminders[:2] == ["starting, for 4 s now", "starting, for 9 s now"]
    assert [line.partition(", for")[0] for line in reminders[2:]] == [
        "ending the world",
        "choosing slices",
        "waiting for slices",
        "starting a world",
        "searching for the newest step",
        "restoring",
        "reading the first batch",
        "compiling",
        "training",
        "step 4 is done and is being saved",
    ]


def test_log_is_reminded_of_a_step_that_takes_ten_times_as_long_as_others(clock):
    stream = io.StringIO()
    shown = progress.Progress(1000, stream, clock=clock)
    for step in range(1, 4):
        clock.secs += 3
        shown("step", step=step, steps=9, loss=2.0, secs=3.0, **RATES)
    pass_secs(shown, clock, 29)
    assert stream.getvalue() == ""
    pass_secs(shown, clock, 1)
    assert stream.getvalue() == "step 4/9, for 30 s now\n"
    stream = Terminal()
    shown = progress.Progress(1000, stream, clock=clock)
    shown("step", step=1, steps=9, loss=2.0, secs=3.0, **RATES)
    pass_secs(shown, clock, 5)
    assert stream.getvalue().endswith("\r\033[Kstep 2/9, for 4 s now")
    shown.close()
    assert stream.getvalue().endswith("now\n")


def test_the_text_of_an_event_has_its_fields():
    for event in events.NAMES.values():
        used = {field for _, field, *_ in string.Formatter().parse(event.text)}
        assert used <= {*event.fields, None}
