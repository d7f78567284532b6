"""The limits that hold for every reader in these tests do hold."""

import itertools

import numpy as np
import pytest

from elastic_ckpt.universal.formats import closed_pickle
from tests.universal.formats import process_limits
from tests.universal.formats.process_limits import TooLongError


def test_memory_is_limited():
    with pytest.raises(MemoryError), process_limits.limited():
        np.ones(2 * process_limits.MOST_BYTES, np.uint8)
    assert np.ones(2 * process_limits.MOST_BYTES, np.uint8).nbytes


def test_time_is_limited(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_SECS", 0)
    with pytest.raises(TooLongError), process_limits.limited():
        any(number < 0 for number in itertools.count())


def test_readers_are_limited(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_BYTES", 1 << 20)
    with pytest.raises(MemoryError):
        closed_pickle.decode(b"\x80\x04" + b"]" * 10**6, file="x.pkl", names={})
