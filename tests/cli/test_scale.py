"""A request for slices is read once, and bounded by the policy of the run."""

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import decision, scale_request


def test_requests_are_read_once_each_and_end_with_the_start(tmp_path, monkeypatch):
    directory = str(tmp_path)
    monkeypatch.setattr(scale_request, "_LOOK_SECS", 0.0)
    configured = decision.Policy(min_slices=2, max_slices=4)
    scale_request.write(directory, 3)
    present = scale_request.ScaledPolicy(directory, configured)
    assert present() is configured
    for slices, most in ((3, 3), (3, 3), (9, 4), (1, 2)):
        before = present()
        scale_request.write(directory, slices)
        assert present().max_slices == most
        # Another object each time, and then the same one.
        assert present() is not before
        assert present() is present()
    before = present()
    (storage.absolute(directory) / scale_request.FILE).write_text("{")
    assert present() is before
