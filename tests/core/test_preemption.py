from elastic_ckpt.core import preemption


def test_steps_count_from_the_first_and_go_on_when_a_run_goes_back():
    for _ in range(2):
        with preemption.counting():
            numbers = [preemption.count(step) for step in (15, 15, 16, 9, 9, 10, 8)]
        # Never less than before, and not -1, which means to the service that none is.
        assert numbers == [1, 1, 2, 3, 3, 4, 5]
    assert preemption.count(9) == 9
