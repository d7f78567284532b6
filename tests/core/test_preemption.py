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


def test_steps_count_from_the_first_and_go_on_when_a_run_goes_back():
    for _ in range(2):
        with preemption.counting():
            numbers = numbers_of((15, 15, 16, 9, 9, 10, 11, 8, 8, 9))
        # None is left out, nor less than before.
        assert numbers == [1, 1, 2, 2, 2, 3, 4, 4, 4, 5]
    assert numbers_of([9]) == [9]


def test_a_loop_that_counts_otherwise_than_its_checkpointer_leaves_no_number_out():
    for saved in (lambda step: step + 1, lambda step: 1000 * step):

        def asked(steps, saved=saved):
            return [number for step in steps for number in (saved(step), step)]

        with preemption.counting():
            numbers = numbers_of(asked(range(100, 110)))
            assert numbers == [n for number in range(1, 11) for n in (number, number)]
            # Then it goes back.
            assert numbers_of(asked([3, 4])) == [11, 11, 12, 12]


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
