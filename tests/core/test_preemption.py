import pytest

from elastic_ckpt.core import preemption


def test_steps_count_from_the_first_and_go_on_when_a_run_goes_back():
    for _ in range(2):
        with preemption.counting():
            numbers = [preemption.count(step) for step in (15, 15, 16, 9, 9, 10, 8, 9)]
        # None is left out, nor less than before.
        assert numbers == [1, 1, 2, 2, 3, 4, 4, 5]
    assert preemption.count(9) == 9


@pytest.mark.parametrize("saved", [lambda step: step + 1, lambda step: 1000 * step])
def test_a_loop_that_counts_otherwise_than_its_checkpointer_leaves_no_number_out(saved):
    with preemption.counting():
        numbers = []
        for step in range(100, 110):
            numbers.append({preemption.count(saved(step)), preemption.count(step)})
        assert numbers == [{number} for number in range(1, 11)]
        # Then it goes back.
        back = [preemption.count(n) for step in (3, 4) for n in (saved(step), step)]
    assert back == [11, 11, 12, 12]
