import io

from elastic_ckpt.cli import progress

STARTED = {
    "run": "first", "hosts": 1, "slices": 1, "devices": 2, "start_step": 0, "steps": 4,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream, log_period=2):
    shown = progress.Progress(log_period, stream)
    shown("run_started", **STARTED)
    for step in range(1, 5):
        shown("step", step=step, steps=4, loss=2.0, secs=0.5)
    shown("save_started", step=4)
    shown("saved", step=4, secs=0.1)
    shown("run_finished", step=4, secs=2.0)
    return stream.getvalue()


def test_a_file_gets_a_line_each_log_period():
    assert show(io.StringIO()) == (
        "first: to step 4 on 1 host, 1 slice, 2 devices\n"
        "step 2/4 | loss 2.0000 | 2.0 steps/s | 1 host, 1 slice, 2 devices"
        " | nothing saved yet\n"
        "step 4/4 | loss 2.0000 | 2.0 steps/s | 1 host, 1 slice, 2 devices"
        " | nothing saved yet\n"
        "step 4 is done, after 2.0 s\n"
    )


def test_a_terminal_gets_one_line_that_moves(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    output = show(Terminal())
    assert output.count("\r\033[K") == 4
    assert output.count("\n") == 3
    assert output.endswith("nothing saved yet\nstep 4 is done, after 2.0 s\n")


def test_a_narrow_terminal_gets_as_much_of_the_line_as_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = show(Terminal()).split("\r\033[K")[1:]
    assert lines[0] == "step 1/4 | loss 2.0000 | 2.0 "
    assert len(lines[0]) == 29


def test_saves_are_shown_in_the_line():
    stream = io.StringIO()
    shown = progress.Progress(1, stream)
    for event in ("save_started", "saved"):
        fields = {"secs": 1.0} if event == "saved" else {}
        shown(event, step=4, **fields)
        shown("step", step=5, steps=9, loss=1.0, secs=1.0)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("saving step 4")
    assert second.endswith("saved step 4")


def test_what_was_interrupted_and_restored_is_told():
    stream = io.StringIO()
    shown = progress.Progress(1, stream)
    shown("step_interrupted", step=8, path="/r/8.tmp", resume_step=4)
    shown("restored", step=4, path="/r/4", secs=0.25)
    assert stream.getvalue() == (
        "step 8 was interrupted while it was saved and is passed over (/r/8.tmp);"
        " the newest complete step is 4\n"
        "restored /r/4 in 0.2 s\n"
    )
