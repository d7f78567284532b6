"""A request for slices is bounded by the policy of the run and outlives its leader."""

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import decision, scale_request

CONFIGURED = decision.Policy(min_slices=2, max_slices=4)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(scale_request, "_LOOK_SECS", 0.0)


def test_each_request_is_another_policy_within_the_bounds(tmp_path, caplog):
    present = scale_request.ScaledPolicy(tmp_path, CONFIGURED)
    assert present() is CONFIGURED
    for slices, most in ((3, 3), (9, 4), (1, 2)):
        before = present()
        scale_request.write(tmp_path, slices)
        assert present().max_slices == most
        assert present() is not before
        assert present() is present()
    before = present()
    (storage.absolute(tmp_path) / scale_request.FILE).write_text("{")
    assert present() is present() is before
    assert caplog.text.count("cannot be read") == 1


def test_a_request_outlives_the_leader_and_not_the_start(tmp_path):
    scale_request.write(tmp_path, 3)
    assert scale_request.ScaledPolicy(tmp_path, CONFIGURED)().max_slices == 3
    # Another machine leads.
    assert scale_request.ScaledPolicy(tmp_path, CONFIGURED)().max_slices == 3
    scale_request.remove(tmp_path)
    assert scale_request.ScaledPolicy(tmp_path, CONFIGURED)() is CONFIGURED
