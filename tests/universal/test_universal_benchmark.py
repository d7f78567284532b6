"""The suite `universal` of the benchmarks runs; its figures are for another day."""

import pytest

from benchmarks import universal_raw


@pytest.mark.slow(minutes=0.5)
def test_the_suite_of_universal_layouts_runs():
    figures = universal_raw.measure(universal_raw.SMALL)
    assert figures["relayout_load_ratio_raw"].value > 0
    assert figures["read_over_needed_percent"].value <= 5
