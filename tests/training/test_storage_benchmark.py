"""The suite `storage` of the benchmarks runs; its figures are for another day."""

import multiprocessing

import pytest

from benchmarks import storage


@pytest.mark.night
def test_the_suite_of_storage_runs():
    # Clients that a process has opened keep to their servers, which end with the suite.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        figures = pool.apply(storage.measure, (storage.SMALL,))
    names = {"log_bytes_per_step", "log_write_ratio", "log_write_ratio_disk"}
    assert names <= figures.keys()
    assert all(figure.value > 0 for figure in figures.values())
    assert figures["log_bytes_per_step"].value < 2000
