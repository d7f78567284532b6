import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import preemption


class Service:
    """Says yes to one number alone, as JAX's; keeps those that it is asked by."""

    def __init__(self, agreed=0):
        self.agreed = agreed
        self.numbers = []

    def ask(self, number):
        self.numbers.append(number)
        return number == self.agreed


def numbers_of(steps):
    service = Service()
    for step in steps:
        assert not preemption.reached(step, service.ask)
    return service.numbers


# A loop may count otherwise than its checkpointer, and goes back in the end.
@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        # None is left out, nor less than before.
        ((15, 15, 16, 9, 9, 10, 11, 8, 8, 9), [1, 1, 2, 2, 2, 3, 4, 4, 4, 5]),
        ((101, 100, 102, 101, 103, 102, 4, 3, 5, 4), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ((7000, 7, 8000, 8, 9000, 9, 3000, 3, 4000, 4), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    ],
)
def test_steps_count_from_the_first_and_go_on_when_a_run_goes_back(steps, numbers):
    for _ in range(2):
        with preemption.counting():
            assert numbers_of(steps) == numbers
    assert numbers_of([9]) == [9]


@given(st.integers(1, 12), st.integers(1, 3))
def test_the_loop_leaves_whoever_asked_by_the_number_that_was_agreed(agreed, often):
    # Its checkpointer may ask about a step more than once, and a callback about others.
    with preemption.counting():
        service, told = Service(agreed), []
        for step in range(20):
            told.append(preemption.reached(step + 2, service.ask))
            for _ in range(often):
                preemption.reached(step, service.ask)
            if step % 3 == 0:
                preemption.reached(step + 1, service.ask)
        assert told.index(True) <= agreed
        assert all(told[told.index(True) :])
        assert sorted(set(service.numbers)) == [*range(1, agreed + 1)]
    with preemption.counting():
        assert not preemption.reached(3, Service().ask)
