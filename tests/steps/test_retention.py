import math

from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.steps import retention

policies = ocp.training.preservation_policies


def held(step, *, complete=True, loss=None):
    """A step that is saved one minute after the one before."""
    return retention.HeldStep(
        step=step,
        time_ms=60_000 * step,
        metrics=None if loss is None else {"loss": loss},
        complete=complete,
    )


def deleted(steps, policy, *, newest, in_flight=(), preserved=()):
    return retention.steps_to_delete(
        steps, policy, newest_complete=newest, in_flight=in_flight, preserved=preserved
    )


POLICIES = st.one_of(
    st.builds(policies.LatestN, st.integers(0, 3)),
    st.builds(policies.EveryNSteps, st.integers(1, 4)),
    st.builds(policies.EveryNSeconds, st.integers(1, 300)),
)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), unique_by=lambda s: s[0]),
    POLICIES,
    st.sets(st.integers(0, 30)),
    st.sets(st.integers(0, 30)),
    st.integers(0, 5),
)
def test_what_must_stay_stays(steps, policy, in_flight, preserved, later):
    listed = [held(step, complete=complete) for step, complete in steps]
    whole = [step for step, complete in steps if complete]
    # Other tiers may make a newer step complete.
    newest = max(whole) + later if whole else None
    gone = deleted(
        listed, policy, newest=newest, in_flight=in_flight, preserved=preserved
    )
    assert gone == sorted(gone)
    assert not set(gone) & (in_flight | preserved | set(whole[-1:] and [max(whole)]))
    assert all(step < newest for step in gone)
    kept = policy.should_preserve([held(step) for step in sorted(whole)], context=None)
    assert not set(gone) & {
        step for step, keep in zip(sorted(whole), kept, strict=True) if keep
    }


def test_the_policies_of_orbax_fit_as_they_are():
    steps = [held(step, loss=abs(step - 5.4)) for step in range(10)]
    best = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=2)
    every = policies.AnyPreservationPolicy([best, policies.EveryNSteps(5)])
    gone = deleted(steps, every, newest=9)
    assert [step for step in range(10) if step not in gone] == [0, 5, 6, 9]


def test_a_policy_counts_only_steps_that_can_be_restored():
    steps = [held(step, complete=step < 6) for step in range(10)]
    assert deleted(steps, policies.LatestN(3), newest=5) == [0, 1, 2]


def test_old_steps_that_are_not_complete_are_removed_and_new_ones_are_not():
    steps = [
        held(1, complete=False),
        held(2),
        held(3, complete=False),
        held(4),
        held(5, complete=False),
    ]
    assert deleted(steps, policies.PreserveAll(), newest=4) == [1, 3]


def test_a_step_of_which_too_little_is_known_is_kept():
    steps = [held(1, complete=None), held(2, complete=False), held(3), held(4)]
    assert deleted(steps, policies.LatestN(1), newest=4) == [2, 3]


def test_nothing_is_removed_while_no_step_is_complete():
    steps = [held(step, complete=False) for step in range(4)]
    assert deleted(steps, policies.LatestN(1), newest=None) == []


def kept(losses, n, **options):
    """The numbers of the best of some steps, whose metrics are given in order."""
    steps = [held(number, loss=loss) for number, loss in enumerate(losses)]
    policy = retention.BestN(n, metric="loss", **options)
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
    policy = retention.BestN(1)
    assert policy.rank({"eval_loss": True}) is None
    assert policy.rank({"eval_loss": "low"}) is None
    assert policy.rank({"accuracy": 1.0}) is None
    assert policy.rank(None) is None
