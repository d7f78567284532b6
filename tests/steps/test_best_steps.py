import math

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.steps import best_steps
from tests.steps.test_retention import held


def kept(losses, n, **options):
    """The numbers of the best of some steps, whose metrics are given in order."""
    steps = [held(number, loss=loss) for number, loss in enumerate(losses)]
    policy = best_steps.BestN(n, metric="loss", **options)
    flags = policy.should_preserve(steps)
    return [number for number, keep in enumerate(flags) if keep]


def test_the_best_are_preserved():
    # Zero is a metric like any other, infinity is none; the oldest of equal ones stays.
    for losses, n, lowest, highest in (
        ([0.0, 1.0, -1.0], 1, [2], [1]),
        ([math.nan, 5.0, math.inf, -math.inf], 2, [1], [1]),
        ([1.0, 1.0, 1.0], 2, [0, 1], [0, 1]),
        ([None, 2.0, None], 1, [1], [1]),
        ([1.0], 0, [], []),
    ):
        assert kept(losses, n) == lowest
        assert kept(losses, n, higher_is_better=True) == highest


@given(st.lists(st.none() | st.floats(), max_size=12), st.integers(0, 5), st.booleans())
def test_no_step_that_is_left_out_is_better_than_one_that_is_preserved(
    losses, n, higher
):
    best = kept(losses, n, higher_is_better=higher)
    sign = -1 if higher else 1
    ranked = {
        number: sign * loss
        for number, loss in enumerate(losses)
        if loss is not None and math.isfinite(loss)
    }
    assert len(best) == min(n, len(ranked))
    worst = max(((ranked[number], number) for number in best), default=None)
    assert all(
        worst is None or (rank, number) > worst
        for number, rank in ranked.items()
        if number not in best
    )


def test_metrics_that_are_no_numbers_are_never_the_best():
    policy = best_steps.BestN(1)
    assert policy.rank({"eval_loss": True}) is None
    assert policy.rank({"eval_loss": "low"}) is None
    assert policy.rank({"accuracy": 1.0}) is None
    assert policy.rank(None) is None
