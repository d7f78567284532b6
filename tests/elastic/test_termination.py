import os
import queue
import select
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.elastic import termination


def end():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def handler():
    """Checks that the handler of before is restored."""
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    yield
    assert not ended
    end()
    assert ended
    signal.signal(signal.SIGTERM, before)


def test_a_notice_takes_the_signal_instead_of_the_handler():
    with termination.Notice() as notice:
        end()
        assert notice.received()


def test_a_notice_is_of_sigterm_alone():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with termination.Notice() as notice:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not notice.received()
        end()
        assert notice.received()
        assert not select.select([notice], [], [], 0)[0]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_signal_that_nobody_has_read_is_passed_on(num_read):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    with termination.Notice() as notice:
        for _ in range(num_read):
            end()
            assert notice.received()
        end()
    # Once read, it is known that this process is to end.
    assert len(received) == 1 - num_read
    signal.signal(signal.SIGTERM, before)


def test_no_signal_is_lost_while_a_notice_opens_and_closes(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    set_descriptor = signal.set_wakeup_fd

    def signalled(*args, **options):
        end()
        previous = set_descriptor(*args, **options)
        end()
        return previous

    monkeypatch.setattr(signal, "set_wakeup_fd", signalled)
    with termination.Notice():
        assert len(received) == 2
    assert len(received) == 4
    signal.signal(signal.SIGTERM, before)


def test_a_process_of_its_own_stops_after_the_step_under_way():
    told = queue.SimpleQueue()

    def emit(name, **fields):
        told.put((name, fields))

    def ended():
        raise AssertionError("the block has ended in time")

    with termination.in_this_process(
        grace_secs=600, ended=ended, emit=emit
    ) as is_stopping:
        assert not is_stopping(1)
        end()
        expected = ("stop_requested", {"within_secs": 600})
        assert told.get(timeout=600) == expected
        assert is_stopping(2)


LATE = """
import os, signal, sys, time
from elastic_ckpt.elastic import termination

def ended(): print("not saved", flush=True)

with termination.in_this_process(
    grace_secs=0.01, ended=ended, emit=lambda name, **_: print(name, flush=True)
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
    assert ended.returncode == termination.EXIT_CODE
    assert ("before the first step" in ended.stderr) == (not steps)


RELEASED = """
import os, signal
from elastic_ckpt.elastic import termination
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigpending() == {signal.SIGTERM}, flush=True)
termination.release()
print("not ended")
"""


def test_what_is_started_in_the_block_holds_the_signal_until_it_is_released():
    with termination.held():
        child = subprocess.Popen(
            [sys.executable, "-c", RELEASED], stdout=subprocess.PIPE, text=True
        )
    with child:
        assert child.stdout.read() == "True\n"
    assert child.returncode == -signal.SIGTERM
