import math

from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.steps import retention

policies = ocp.training.preservation_policies


def held(step, *, complete=True, loss=None):
    """A step that is saved one minute after the one before."""
    return retention.TierStep(
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


def test_what_is_not_complete_is_removed_once_a_newer_step_can_replace_it():
    latest = policies.LatestN
    for complete, policy, newest, gone in (
        # A policy counts only steps that can be restored.
        ([True] * 6 + [False] * 4, latest(3), 5, [0, 1, 2]),
        ([False, True, False, True, False], policies.PreserveAll(), 3, [0, 2]),
        # A step of which too little is known is kept.
        ([None, False, True, True], latest(1), 3, [1, 2]),
        # Nothing is removed while no step is complete.
        ([False] * 4, latest(1), None, []),
    ):
        steps = [held(step, complete=each) for step, each in enumerate(complete)]
        assert deleted(steps, policy, newest=newest) == gone


# Zero is a metric like any other, infinity is none.
LOSSES = st.none() | st.floats() | st.sampled_from([0.0, 1.0, math.inf, math.nan])


@given(st.lists(LOSSES, max_size=12), st.integers(0, 5), st.booleans())
def test_the_best_are_preserved(losses, n, higher):
    steps = [held(number, loss=loss) for number, loss in enumerate(losses)]
    policy = retention.BestN(n, metric="loss", higher_is_better=higher)
    flags = policy.should_preserve(steps)
    best = [number for number, keep in enumerate(flags) if keep]
    sign = -1 if higher else 1
    ranked = {
        number: sign * loss
        for number, loss in enumerate(losses)
        if loss is not None and math.isfinite(loss)
    }
    # The oldest of equal ones stays.
    order = sorted(ranked, key=lambda number: (ranked[number], number))
    assert best == sorted(order[:n])


def test_metrics_that_are_no_numbers_are_never_the_best():
    for metrics in ({"eval_loss": True}, {"eval_loss": "low"}, {"accuracy": 1.0}, None):
        assert retention.BestN(1).rank(metrics) is None
