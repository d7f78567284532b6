import gc
import subprocess
import sys
import threading
import time

import pytest

from elastic_ckpt.core import background, errors
from tests import ctrl_c

NAME = "elastic_ckpt-background"
# Far longer than anything here takes, and far shorter than a test that hangs.
SOON_SECS = 600


class Numbers:
    """Counts its calls; some numbers raise, and one call can be held up."""

    def __init__(self, failing=()):
        self.made = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._failing = failing

    def __call__(self):
        number = len(self.made)
        self.made.append(number)
        assert self.may_go_on.wait(SOON_SECS)
        if number in self._failing:
            raise KeyError(number)
        return number

    def hold(self):
        self.may_go_on.clear()


@pytest.fixture
def start():
    started = []

    def begin(call, depth=2):
        started.append(background.BackgroundCalls(call, depth=depth))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threads()
    yield
    wait_until(lambda: threads() <= before)


def threads():
    return {t for t in threading.enumerate() if t.name == NAME}


def wait_until(is_so):
    deadline = time.monotonic() + SOON_SECS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settled(one):
    """Waits for everything that was submitted."""
    return one.submit(lambda: None).result(SOON_SECS)


def test_results_and_errors_come_in_the_order_of_the_calls(start):
    one = start(Numbers(failing={1, 4}))
    actual = []
    for _ in range(7):
        try:
            actual.append(one.take())
        except KeyError as error:
            actual.append(repr(error))
    assert actual == [0, "KeyError(1)", 2, 3, "KeyError(4)", 5, 6]


def test_an_error_of_any_kind_is_raised_where_the_result_is_taken(start):
    for error in (StopIteration, KeyboardInterrupt, SystemExit):

        def fail(error=error):
            raise error

        one = start(fail)
        for _ in range(3):
            with pytest.raises(error):
                one.take()


def test_it_is_never_further_ahead_than_its_depth_and_always_so_far(start):
    for depth in (1, 2, 5):
        numbers = Numbers()
        one = start(numbers, depth=depth)
        assert numbers.made == []
        for taken in range(1, 10):
            one.take()
            assert len(numbers.made) <= taken + depth
            settled(one)
            assert len(numbers.made) == taken + depth
            assert one.num_ready() == depth


def test_dropped_results_are_not_called_for_and_the_next_are_new(start):
    numbers = Numbers()
    one = start(numbers, depth=3)
    one.take()
    settled(one)
    numbers.hold()
    one.take()
    wait_until(lambda: len(numbers.made) == 5)
    one.take()
    one.take()
    # Number 4 is under way; 5 and 6 have not begun.
    one.drop()
    assert one.num_ready() == 0
    numbers.may_go_on.set()
    assert one.take() == 5


def test_a_take_that_is_interrupted_loses_no_result(start):
    numbers = Numbers()
    one = start(numbers)
    one.take()
    # What is submitted comes after the calls that are pending.
    assert one.submit(lambda: list(numbers.made)).result(SOON_SECS) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        one.submit(lambda: 1 / 0).result(SOON_SECS)
    numbers.hold()
    assert [one.take(), one.take()] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.pressed_during(one.take)
    numbers.may_go_on.set()
    assert [one.take(), one.take()] == [3, 4]


def held_up(start):
    """One whose call does not return, and what it calls."""
    numbers = Numbers()
    one = start(numbers)
    one.take()
    settled(one)
    numbers.hold()
    one.take()
    return one, numbers


def test_a_call_that_hangs_is_left_alone_after_a_while_or_at_once(
    start, caplog, monkeypatch
):
    one, numbers = held_up(start)
    one.close(wait=False)
    assert not numbers.may_go_on.is_set()
    numbers.may_go_on.set()
    monkeypatch.setattr(background, "_CLOSE_SECS", 0.05)
    one, numbers = held_up(start)
    wait_until(lambda: len(numbers.made) == 4)
    one.close()
    one.close()
    for use in (one.take, lambda: one.submit(list)):
        with pytest.raises(errors.DataError, match="was closed; make a new one"):
            use()
    assert "has not returned within 0.05 s; its thread is abandoned" in caplog.text
    numbers.may_go_on.set()


class Owner:
    """Something that reads ahead."""

    def __init__(self, call):
        self.calls = background.BackgroundCalls(call, depth=2)


def owned(call):
    """An owner that is closed when the last reference to it is gone."""
    owner = Owner(call)
    background.close_with(owner, owner.calls.close)
    return owner


def in_a_cycle(owner):
    owner.itself = owner


def test_garbage_is_closed_and_waits_for_no_call():
    before = threads()
    for in_cycle in (False, True):
        numbers = Numbers()
        owner = owned(numbers)
        owner.calls.take()
        settled(owner.calls)
        if in_cycle:
            in_a_cycle(owner)
        else:
            numbers.hold()
            owner.calls.take()
        assert len(threads() - before) == 1
        del owner
        gc.collect()
        assert in_cycle or not numbers.may_go_on.is_set()
        numbers.may_go_on.set()
        wait_until(lambda: threads() == before)


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


def ended(ending):
    program = [sys.executable, "-c", PROGRAM + ending]
    return subprocess.run(
        program, capture_output=True, text=True, check=True, timeout=SOON_SECS
    )


def test_a_program_that_ends_closes_what_is_open_without_a_word():
    one = "one = owned(); del one; time.sleep(0.2)\n"
    two = "one, two = owned(), owned(); sys.exit(0)"
    # Collected while it is closed.
    garbage = "one = owned(); one.itself = one; del one"
    for ending, printed in (
        (one + two, "closed False\n" + "closed True\n" * 2),
        (garbage, "closed True\n"),
    ):
        done = ended(ending)
        assert (done.stdout, done.stderr) == (printed, "")


def test_a_program_ends_though_a_call_hangs():
    program = (
        "background._CLOSE_SECS = 0.05\n"
        "one = owned()\n"
        "one.calls.submit(threading.Event().wait)\n"
        "print('end', flush=True)"
    )
    done = ended(program)
    assert done.stdout == "end\n"
    assert "its thread is abandoned" in done.stderr
