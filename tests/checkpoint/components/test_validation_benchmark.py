"""The suite `validation` of the benchmarks runs; its figures are for another day."""

import pytest

from benchmarks import validation


@pytest.mark.slow
def test_the_suite_of_validation_runs():
    figures = validation.measure(validation.SMALL)
    assert {"tensor_ratio_read", "full_ratio_read", "quick_ms"} <= figures.keys()
    assert all(figure.value > 0 for figure in figures.values())
