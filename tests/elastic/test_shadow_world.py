"""While a world trains, a shadow world compiles for one slice fewer."""

import functools

import pytest

from elastic_ckpt.core import events
from elastic_ckpt.elastic import cluster, decision, processes, watch
from elastic_ckpt.training import schema
from tests.elastic import tiny_hosts

FEWER = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)


class Run:
    """Worlds of two slices, of one device each."""

    def __init__(self, directory, *, budget_secs):
        self.events = []
        self.gate = directory / "gate"
        self.processes = processes.configured(
            # A program that JAX's cache has is not kept.
            schema.WorldSection(
                hosts=2, slices=2, jax_cache_dir=str(directory / "jax_cache")
            ),
            log_directory=str(directory / "logs"),
            limits=watch.unlimited(compile_ahead_secs=budget_secs),
            emit=self.emit,
        )

    def emit(self, name, **fields):
        events.check(name, fields)
        self.events.append(name)
        if name.startswith("compile") and "ahead" in name:
            self.why = fields.get("why")
            self.gate.touch()

    def world(self, *, slices, compile_ahead=None):
        """The events of a world, until the smaller one is compiled or has failed."""
        self.events.clear()
        work = decision.Train(slices=slices, spares=(), rows=8, accumulated=1)
        assert self.processes.run_world(
            functools.partial(tiny_hosts.compiles, gate=str(self.gate)),
            cluster.Assignment(number=1, work=work, compile_ahead=compile_ahead),
            emit=self.emit,
            has_changed=lambda: False,
        )
        return {name for name in self.events if "compile" in name or "loaded" in name}


@pytest.fixture
def run(request, tmp_path):
    run = Run(tmp_path, **request.param)
    yield run
    run.processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("run", [{"budget_secs": 600.0}], indirect=True)
def test_the_program_of_the_smaller_world_is_loaded_when_a_slice_is_lost(run):
    smaller = cluster.CompileAhead(compiles=tiny_hosts.compiles, work=FEWER)
    assert run.world(slices=(0, 1), compile_ahead=smaller) == {
        "compile_started",
        "compiled",
        "compiled_ahead",
    }
    assert run.world(slices=(0,)) == {"executable_loaded"}


@pytest.mark.slow
@pytest.mark.parametrize("run", [{"budget_secs": 0.01}], indirect=True)
def test_compiling_ahead_ends_with_its_budget(run):
    smaller = cluster.CompileAhead(compiles=tiny_hosts.compiles, work=FEWER)
    assert "compile_ahead_failed" in run.world(slices=(0, 1), compile_ahead=smaller)
    assert run.why == "not done within 0.01 s; raise elastic_compile_ahead_seconds"
