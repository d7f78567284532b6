import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from elastic_ckpt.elastic import termination


def end():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def ended():
    """How often the handler of before got the signal; it is restored at the end."""
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    yield ended
    num_ended = len(ended)
    end()
    assert len(ended) == num_ended + 1
    signal.signal(signal.SIGTERM, before)


def test_a_notice_takes_sigterm_alone_instead_of_the_handler(ended):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with termination.Notice() as notice:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not notice.received()
        end()
        assert notice.received()
        assert not notice.is_coming()
        # It is known that this process is to end.
        end()
    assert not ended
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_nobody_has_read_is_passed_on_whenever_it_comes(
    ended, monkeypatch
):
    set_descriptor = signal.set_wakeup_fd

    def signalled(*args, **options):
        end()
        previous = set_descriptor(*args, **options)
        end()
        return previous

    monkeypatch.setattr(signal, "set_wakeup_fd", signalled)
    with termination.Notice():
        assert len(ended) == 2
        end()
        assert len(ended) == 2
    assert len(ended) == 5


def test_a_process_of_its_own_stops_after_the_step_under_way():
    told = queue.SimpleQueue()

    def emit(name, **fields):
        # The run goes on until this is told: no event of its end comes before.
        told.put((name, fields, is_stopping(2)))

    more = {"ended": pytest.fail, "emit": emit}
    with termination.in_this_process(grace_secs=600, **more) as is_stopping:
        assert not is_stopping(1)
        end()
        assert told.get(timeout=600) == ("stop_requested", {"within_secs": 600}, False)
        while not is_stopping(3):
            time.sleep(0.01)


LATE = """
import os, signal, sys, time
from elastic_ckpt.elastic import termination

def emit(name, **_): print(name, flush=True)

with termination.in_this_process(
    grace_secs=0.01, ended=lambda: emit("not saved"), emit=emit
) as is_stopping:
    for step in range(int(sys.argv[1])):
        is_stopping(step)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("steps", "told"), [(0, ["not saved"]), (1, ["stop_requested", "not saved"])]
)
def test_a_process_ends_before_its_first_step_or_when_its_grace_is_over(steps, told):
    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split("\n")[:-1] == told
    assert ended.returncode == termination.exit_code()
    assert ("before the first step" in ended.stderr) == (not steps)
