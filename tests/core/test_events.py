import pytest

from elastic_ckpt.core import events


def test_a_misspelt_event_or_field_is_caught():
    events.nobody("saved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="sved"):
        events.nobody("sved", step=1, secs=0.5)
    with pytest.raises(AssertionError, match="seconds"):
        events.nobody("saved", step=1, seconds=0.5)
