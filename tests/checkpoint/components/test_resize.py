"""Rules for the states of a component when there are other hosts."""

import pytest

from elastic_ckpt.checkpoint.components import resize
from elastic_ckpt.core import errors


def first_half(states, count):
    """A rule of too few states."""
    return states[: count // 2]


def names(count):
    return tuple(f"rank-{number:05d}" for number in range(count))


def test_the_same_states_are_found_by_name_in_any_order():
    assert resize.place_of_same(names(3), names(3), 2) == 2
    assert resize.place_of_same(names(3)[::-1], names(3), 2) == 0


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 1), (1, 3)])
def test_other_states_are_a_resize(old, new):
    assert resize.place_of_same(names(old), names(new), 0) is None


def test_a_single_state_is_that_of_all_under_any_pattern():
    assert resize.place_of_same(["global"], ["rank-00000"], 0) == 0
    assert resize.place_of_same(["global"], ["rank-00000", "rank-00001"], 0) is None


def applied(rule, old, count):
    """The new states of all hosts."""
    needed = [old[place] for place in resize.needed(rule, len(old))]
    return [
        resize.new_state(rule, needed, initial="new", new_count=count, own=own)
        for own in range(count)
    ]


def test_each_rule_gives_each_host_its_state():
    old = ["a", "b", "c"]
    assert applied("reset", old, 2) == ["new", "new"]
    assert applied("from_first", old, 2) == ["a", "a"]
    assert applied(lambda states, count: (states * 2)[:count], old, 4) == list("abca")


def test_a_rule_reads_the_states_that_it_needs():
    assert list(resize.needed("reset", 5)) == []
    assert list(resize.needed("from_first", 5)) == [0]
    assert list(resize.needed(first_half, 3)) == [0, 1, 2]


def test_a_function_that_returns_another_number_is_refused():
    with pytest.raises(errors.CheckpointError, match="returned 1 states for 2 places"):
        applied(first_half, ["a", "b"], 2)


def test_without_a_rule_the_error_says_what_to_choose():
    error = resize.refused("cache", "per_host", names(4), names(2))
    message = str(error)
    assert "'cache' was saved per_host with 4 states" in message
    assert "there are 2 now" in message
    for choice in ("reset", "from_first", "(old_states, new_count)"):
        assert choice in message


def test_an_unknown_rule_is_refused():
    with pytest.raises(errors.ConfigError, match="on_resize='keep' is no rule"):
        resize.check("keep")
