"""The suite `recovery` of the benchmarks computes its figures from a run's events."""

import pytest

from benchmarks import recovery, recovery_loops, recovery_run, report


def event(name, time, **fields):
    return {"event": name, "time": time, **fields}


def killed(*, before=(), **fields):
    recovered = event("recovered", 107.0, secs=5.0, steps_lost=8, **fields)
    return recovery_run.Change(began=100.0, recovered=recovered, before=before)


def test_a_change_lasts_from_the_kill_to_the_first_step():
    change = killed()
    assert change.secs == 7
    assert change.detect_secs == 2


def test_what_comes_before_the_first_step_is_held_against_a_bare_world():
    figures = recovery.of_bare([killed(step_secs=4.0)], [1.0, 1.5, 9.0])
    assert figures["recover_over_bare_ratio"].samples == (2.0,)


def test_lost_steps_before_a_save_without_copies_are_counted_apart():
    saved = (event("save_started", 90, step=10), event("replicated", 91, step=10))
    begun = event("save_started", 95, step=16)
    assert killed(before=saved).steps_lost() == (8, 0)
    assert killed(before=(*saved, begun)).steps_lost() == (8, 6)


def test_a_cold_change_is_held_against_compiling_and_restoring():
    change = killed(compile_secs=4.0, restore_secs=0.5)
    figures = recovery.of_cold([change])
    assert figures["recover_cold_over_compile_secs"].samples == (2.5,)


def test_a_planned_change_pauses_from_one_step_to_the_next():
    step_times = [(1.0, 7), (2.0, 8), (6.5, 9), (7.0, 10)]
    started = event("world_started", 3.0)
    assert recovery_run.pause_secs(step_times, started) == 4.5
    assert recovery_run.step_secs(step_times, 0, 3) == [1.0]


def test_the_smallest_period_costs_less_than_five_percent():
    for cost_secs in (0.0, 0.2, 1.0, 3.33):
        period = recovery.smallest_period(cost_secs, 1.0)
        assert cost_secs < 0.05 * period
        assert period == 1 or cost_secs >= 0.05 * (period - 1)


def test_the_loop_is_held_against_a_step_of_fifty_ms():
    thread = {"bare thread": [0.001], "loop thread": [0.0011]}
    figures = recovery.of_loop({"bare": [0.04], "loop": [0.0405]} | thread)
    assert abs(figures["loop_overhead_percent"].value - 1) < 1e-6
    assert abs(figures["loop_thread_percent"].value - 0.2) < 1e-6


@pytest.mark.night
def test_turns_of_the_loop_and_of_its_saves_are_timed(tmp_path):
    settings = {
        **recovery._COMMON,
        **recovery.SMALL.large,
        "hosts": 2,
        "slices": 2,
        "elastic_min_slice_count": 2,
        "grain_train_files": f"{tmp_path}/text.array_record",
        "local_checkpoint_directory": f"{tmp_path}/memory",
    }
    turns = recovery.SMALL.large_turns
    secs = recovery_loops.measure(settings, tmp_path / "turns", turns)
    assert {*recovery.of_loop(secs), *recovery.of_saves(secs)} >= {
        "loop_thread_percent",
        "smallest_period_under_5_percent",
    }
    assert all(len(each) == turns.rounds for each in secs.values())


def test_figures_of_several_runs_have_the_samples_of_all():
    runs = [{"secs": report.figure("s", "", [secs])} for secs in (1, 5, 2)]
    assert report.merged(runs)["secs"].samples == (1, 5, 2)
    assert report.merged(runs)["secs"].value == 2
