"""The suite `universal` of the benchmarks runs; its figures are for another day."""

import os

import pytest

from benchmarks import (
    universal_convert,
    universal_deepspeed,
    universal_orbax,
    universal_peaks,
    universal_plan,
    universal_raw,
)


@pytest.mark.night
def test_the_suite_of_universal_layouts_runs():
    figures = universal_raw.measure(universal_raw.SMALL)
    assert figures["relayout_load_ratio_raw"].value > 0
    assert figures["read_over_needed_percent"].value <= 5


@pytest.mark.night
def test_peaks_of_loads_are_measured():
    figures = universal_peaks.measure(universal_peaks.SMALL)
    assert figures["peak_over_bound_percent_0_gib"].value <= 10
    assert figures["peak_over_bound_percent_orbax_0_gib"].value <= 10


@pytest.mark.night
def test_loads_of_ours_and_of_orbax_have_the_same_values():
    figures = universal_orbax.measure(universal_orbax.SMALL)
    assert figures["relayout_load_ratio_plain_orbax"].value > 0
    assert figures["safetensors_load_ratio_orbax_inner"].value > 0


@pytest.mark.night
def test_the_suite_of_conversions_runs():
    figures = universal_convert.measure(universal_convert.SMALL)
    assert figures["convert_ratio_cp"].value > 0
    assert figures["convert_ratio_cp_safetensors_transposed"].value > 0


@pytest.mark.night
def test_the_peer_deepspeed_is_measured_or_said_to_be_left_out(capsys):
    figures = universal_deepspeed.measure(universal_deepspeed.SMALL)
    is_named = universal_deepspeed.PYTHON in os.environ
    assert ("convert_ratio_ds_to_universal_2" in figures) == is_named
    assert ("deepspeed: left out" in capsys.readouterr().out) != is_named


@pytest.mark.night
def test_the_plan_of_a_checkpoint_of_many_tensors_is_measured():
    figures = universal_plan.measure(1000)
    assert figures["match_and_plan_secs"].value > 0
    assert figures["open_match_and_plan_dcp_secs"].value > 0
