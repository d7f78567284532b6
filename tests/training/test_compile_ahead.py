"""The training loads the program that was compiled ahead."""

import dataclasses

import pytest

from elastic_ckpt.elastic import kept_executables
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.training import job, load
from tests import runs


@pytest.mark.slow
@pytest.mark.usefixtures("without_jax_cache")
def test_training_loads_what_was_compiled_ahead_and_nothing_is_written(
    tmp_path, corpus
):
    config = load.load(runs.write_config(tmp_path, corpus, steps=2, slices=2))
    events = []

    def emit(name, **_):
        if "compile" in name or "loaded" in name:
            events.append(name)

    with kept_executables.kept() as kept:
        world = World(
            number=1,
            slices=(0, 1),
            slice_name="0",
            emit=emit,
            _between=BetweenWorlds(executables=kept),
        )
        job.compile_ahead(config, dataclasses.replace(world, number=2))
        assert events == ["compile_started", "compiled"]
        assert not (tmp_path / "tiny").exists()
        job.train(config, world)
        assert events[2:] == ["executable_loaded"]
    assert [step.step for step in runs.steps(tmp_path / "tiny")] == [0, 1]
