"""What is told of rules for the states of a component when there are other hosts.

`test_component` applies each rule on any number of hosts.
"""

import pytest

from elastic_ckpt.checkpoint.components import resize
from elastic_ckpt.core import errors


def test_a_function_that_returns_another_number_is_refused():
    with pytest.raises(errors.CheckpointError, match="returned 1 states for 2 places"):
        resize.new_state(
            lambda states, _: states[:1], ["a", "b"], initial=0, new_count=2, own=0
        )


def test_without_a_rule_the_error_says_what_to_choose():
    old, new = ([f"rank-{number:05d}" for number in range(n)] for n in (4, 2))
    message = str(resize.refused("cache", "per_host", old, new))
    assert "'cache' was saved per_host with 4 states" in message
    assert "there are 2 now" in message
    for choice in ("reset", "from_first", "(old_states, new_count)"):
        assert choice in message


def test_an_unknown_rule_is_refused():
    with pytest.raises(errors.ConfigError, match="on_resize='keep' is no rule"):
        resize.check("keep")
