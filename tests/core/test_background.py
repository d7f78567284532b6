import subprocess
import sys
import threading

import pytest

from elastic_ckpt.core import background, errors
from tests.tiers import served

# Far longer than anything here takes, and far shorter than a test that hangs.
SOON_SECS = 600


class Numbers:
    """Counts its calls; some numbers raise, and one call can be held up."""

    def __init__(self, failing=()):
        self.made = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._failing = dict(failing)

    def __call__(self):
        number = len(self.made)
        self.made.append(number)
        assert self.may_go_on.wait(SOON_SECS)
        if number in self._failing:
            raise self._failing[number]
        return number


@pytest.fixture
def start():
    before, started = threads(), []

    def begin(call, depth=2):
        started.append(background.BackgroundCalls(call, depth=depth))
        return started[-1]

    yield begin
    for one in started:
        one.close()
    served.until(lambda: threads() <= before)


def threads():
    return {t for t in threading.enumerate() if t.name == "elastic_ckpt-background"}


def settle(one):
    """Waits for everything that was submitted."""
    one.submit(lambda: None).result(SOON_SECS)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_and_errors_come_in_order_and_never_further_ahead(start, depth):
    numbers = Numbers({1: KeyError(), 3: StopIteration(), 4: SystemExit()})
    one, actual = start(numbers, depth=depth), []
    assert numbers.made == []
    for _ in range(2):
        one.begin()
        settle(one)
        assert numbers.made == [0]
    for taken in range(1, 8):
        try:
            actual.append(one.take())
        except BaseException as error:
            actual.append(type(error))
        assert len(numbers.made) <= taken + depth
        settle(one)
        assert len(numbers.made) == taken + depth
        assert one.num_ready() == depth
    assert actual == [0, KeyError, 2, StopIteration, SystemExit, 5, 6]


def held_up(start):
    """One whose call does not return, after numbers 0 and 1, and what it calls."""
    numbers = Numbers()
    one = start(numbers)
    one.take()
    settle(one)
    numbers.may_go_on.clear()
    one.take()
    served.until(lambda: len(numbers.made) == 4)
    return one, numbers


def test_dropped_results_are_not_called_for_and_the_next_are_new(start):
    one, numbers = held_up(start)
    assert one.take() == 2
    # Number 3 is under way; 4 and 5 have not begun.
    one.drop()
    assert one.num_ready() == 0
    numbers.may_go_on.set()
    assert one.take() == 4


def test_a_call_that_hangs_is_left_alone_after_a_while_or_at_once(
    start, caplog, monkeypatch
):
    one, numbers = held_up(start)
    one.close(wait=False)
    assert not numbers.may_go_on.is_set()
    numbers.may_go_on.set()
    monkeypatch.setattr(background, "_CLOSE_SECS", 0.05)
    # The thread does not wait for itself.
    one = start(Numbers())
    one.submit(one.close).result(SOON_SECS)
    assert not caplog.messages
    one, numbers = held_up(start)
    one.close()
    one.close()
    for use in (one.take, lambda: one.submit(list)):
        with pytest.raises(errors.DataError, match="was closed; create a new one"):
            use()
    assert "has not returned within 0.05 s; its thread is abandoned" in caplog.text
    numbers.may_go_on.set()


PROGRAM = """
import gc, sys, threading, time
from elastic_ckpt.core import background

class Owner:
    pass

def owned():
    owner = Owner()
    owner.calls = background.BackgroundCalls(lambda: 1, depth=1)
    def close(*, wait, one=owner.calls):
        one.close(lambda: print("closed", wait, flush=True), wait=wait)
        gc.collect()
    background.close_with(owner, close)
    owner.calls.take()
    return owner

"""
# Neither garbage, which is closed at once, nor the end of the program is reported.
GONE_AND_OPEN = """
one = owned(); del one; time.sleep(0.2)
one, two = owned(), owned(); sys.exit(0)
"""
COLLECTED_WHILE_IT_IS_CLOSED = "one = owned(); one.itself = one; del one"
HANGING = """
background._CLOSE_SECS = 0.05
one = owned()
one.calls.submit(threading.Event().wait)
print('end', flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "printed", "logged"),
    [
        (GONE_AND_OPEN, "closed False\n" + "closed True\n" * 2, ""),
        (COLLECTED_WHILE_IT_IS_CLOSED, "closed True\n", ""),
        (HANGING, "end\n", "its thread is abandoned"),
    ],
)
def test_a_program_that_ends_closes_what_is_open(ending, printed, logged):
    program = [sys.executable, "-c", PROGRAM + ending]
    done = subprocess.run(
        program, capture_output=True, text=True, check=True, timeout=SOON_SECS
    )
    assert done.stdout == printed
    assert logged in done.stderr
    assert bool(logged) == bool(done.stderr)
