"""Runs that go back to an older step, or save one anew: which saves count then."""

import contextlib
import os
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import claims, persistent_root
from tests import shared_memory
from tests.model import simulated_world, test_crash_points
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

policies = ocp.training.preservation_policies
ALL = policies.PreserveAll()


class Run:
    """Worlds of one run, one after the other; the state of a step is a number."""

    def __init__(self, path):
        self.path = path

    def world(
        self,
        *,
        stored=True,
        keep_in_ram=None,
        limit_bytes=None,
        ram="ram",
        **options,
    ):
        steps = self.path / "steps" if stored else None
        return tiered_steps.checkpointer(
            self.path / ram,
            steps,
            keep_in_ram=keep_in_ram,
            limit_bytes=limit_bytes,
            **options,
        )

    def save(self, opened, *steps, line):
        for step in steps:
            assert opened.save(step, {"w": jnp.full(4, 100 * line + step)})
            opened.wait()

    def overwrite(self, opened, step, *, line):
        values = {"w": jnp.full(4, 100 * line + step)}
        assert opened.save(step, values, overwrite=True)
        opened.wait()

    def newest(self, **options):
        """The newest step for a new world, and its values."""
        with self.world(**options) as opened:
            step = opened.latest.step
            return step, value(opened.load(None))

    def steps(self, **options):
        with self.world(**options) as opened:
            return [
                (each.step, value(opened.load(each))) for each in opened.checkpoints
            ]

    def stock(self):
        """The steps that stock Orbax finds, with their values."""
        with ocp.training.Checkpointer(self.path / "steps") as stock:
            return [
                (each.step, value(stock.load(each.step))) for each in stock.checkpoints
            ]

    def set_aside(self):
        root = persistent_root.PersistentRoot.from_path(self.path / "steps")
        return [step for step, _ in root.set_aside_steps()]

    def lose_ram(self):
        shutil.rmtree(self.path / "ram")


def value(state):
    (number,) = set(np.asarray(state["w"]).tolist())
    return number


class Lines:
    """A run in the simulation of `tests/model`, and the line of saves that counts.

    Attributes:
      line: the steps that count, each with the seed of its state.
    """

    def __init__(self, sim, store_every):
        self._sim = sim
        self._options = {"store_every": store_every}
        self._seed = 0
        self.line = []
        self._stored = set()
        # How many steps of the line the next save goes on from.
        self._number = 0
        sim.open((0, 1), **self._options)

    def save(self, *, overwrite=False):
        del self.line[self._number :]
        step = self.line[-1][0] + 1 if self.line else 1
        if overwrite and self.line:
            step, _ = self.line.pop()
        self._seed += 1
        self.line.append((step, self._seed))
        self._number = len(self.line)
        self._sim.events.clear()
        state = simulated_world.state_of(self._seed)
        assert self._sim.world.save(step, state, overwrite=overwrite)
        self._sim.world.wait()
        if any(name == "backed_up" for name, _ in self._sim.events):
            self._stored.add(self._seed)
        # What stock Orbax finds, too.
        root = persistent_root.PersistentRoot.from_path(self._sim.storage)
        if self._seed in self._stored:
            assert root.steps() == [s for s, seed in self.line if seed in self._stored]
        self._check_list()

    def go_back(self, number):
        there = self._there()
        save = there[number % len(there)]
        self._check(save[0], save[1], go_back=True)
        self._number = self.line.index(save) + 1

    def begin_again(self, *, loses_memory):
        self._sim.world.close()
        if loses_memory:
            for machine in (0, 1):
                self._sim.evict(machine)
            while self.line and self.line[-1][1] not in self._stored:
                self.line.pop()
        # A step that was loaded and not gone on from is forgotten.
        self._number = len(self.line)
        self._sim.open((0, 1), **self._options)
        self._check_list()
        if self.line:
            self._check(None, self.line[-1][1])

    def _there(self):
        # The newest is in RAM.
        newest = self.line[-1:]
        return [each for each in self.line if each[1] in self._stored or each in newest]

    def _check_list(self):
        listed = [each.step for each in self._sim.world.checkpoints]
        assert listed == [step for step, _ in self._there()]

    def _check(self, step, seed, **options):
        wanted = {"state": simulated_world.abstract()}
        read = self._sim.world.load_checkpointables(step, wanted, **options)["state"]
        for name, values in simulated_world.state_of(seed).items():
            assert read[name].tobytes() == values.tobytes()


# A number: a load of one of the steps that are there, to go on from.
ACTS = st.sampled_from(["save", "overwrite", "again", "memory is lost", 0, 1, 2])


@given(st.sampled_from([1, 1, 2, 100]), st.lists(ACTS, min_size=2, max_size=8))
@example(1, [0, "save", 0, "save", "save", "memory is lost"])
@example(1, [1, "overwrite", "again", "save", "overwrite"])
@example(2, ["save", 0, "again", 0, "save", "memory is lost", "save"])
@example(100, ["overwrite", "memory is lost", "save", "again", "save"])
@pytest.mark.slow
def test_the_line_that_a_run_took_last_counts_and_no_other(store_every, acts):
    with (
        shared_memory.directory("lines") as directory,
        simulated_world.Simulation(pathlib.Path(directory)) as sim,
    ):
        lines = Lines(sim, store_every)
        for act in ["save"] * 3 + acts:
            if act in ("save", "overwrite"):
                lines.save(overwrite=act == "overwrite")
            elif act in ("again", "memory is lost"):
                lines.begin_again(loses_memory=act != "again")
            elif lines.line:
                lines.go_back(act)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_goes_back_has_one_line_without_memory_too():
    history = test_crash_points.HISTORIES["go back"]
    found = []
    for number in range(1, test_crash_points.num_changes(*history) + 1, 6):
        with test_crash_points.crash_at("go back", "all", number, torn=False) as run:
            for machine in test_crash_points.WORLD:
                run.evict(machine)
            run.open(test_crash_points.WORLD)
            found.append(run.head.step)
    # The old line, then the new one: by its record alone, or by its first step.
    assert {3, 1} <= {*found}
    assert found == sorted(found, key=[3, 1, 2].index)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_the_record_of_a_line_that_was_damaged_is_named(run):
    with run.world() as opened:
        run.save(opened, 1, 2, line=1)
    with run.world(every=100) as opened:
        opened.load(1)
        run.save(opened, 2, line=2)
    run.lose_ram()
    record = run.path / "steps" / "worlds" / "2.json"
    content = record.read_bytes()
    for damaged in (
        content[:-3],
        content.replace(b'"parents": [[1', b'"parents": [[2'),
    ):
        record.write_bytes(damaged)
        with pytest.raises(errors.CheckpointError, match=r"2\.json .*; restore the"):
            run.world()
    record.write_bytes(content)
    assert run.newest() == (1, 101)


def start(name):
    """A start of the run, which claims its worlds."""
    return {"world": run_world.RunWorld(claimant=claims.Claimant(name=name))}


@pytest.mark.parametrize("steps", [[], [1, 2, 3]])
def test_saves_of_a_replaced_start_do_not_count(run, steps):
    ended = contextlib.suppress(errors.ReplacedError)
    with ended, run.world(ram="of-a", **start("a")) as old:
        run.save(old, *steps, line=1)
        with run.world(ram="of-b", **start("b")) as new:
            assert [old.claim_world(), new.claim_world()] == [1, 2]
            # The old start saves on, until it is to commit a step to storage.
            with pytest.raises(errors.ReplacedError, match="b, has continued it"):
                run.save(old, 4, line=1)
            with pytest.raises(errors.ReplacedError, match="b, has continued it"):
                run.save(old, 5, line=1)
            assert [each.step for each in new.checkpoints] == steps
            run.save(new, 4, line=2)
        assert old.latest.step == 4
        old.wait()
    # Also where the memory of the old start is.
    assert run.newest(ram="of-a") == (4, 204)
    assert run.stock() == [*((step, 100 + step) for step in steps), (4, 204)]


def test_abandoned_steps_come_back_by_name_and_their_line_goes_on(run):
    with run.world() as opened:
        run.save(opened, *range(1, 7), line=1)
        opened.load(4)
        run.save(opened, 5, line=2)
    with run.world() as opened:
        assert value(opened.load(6)) == 106
        assert value(opened.load(5)) == 205
        assert value(opened.load(6)) == 106
        run.save(opened, 7, line=1)
    assert run.newest() == (7, 107)
    assert run.stock() == [(step, 100 + step) for step in range(1, 8)]
    assert run.set_aside() == [5]


def test_a_fallback_names_its_parent_and_the_incomplete_step_does_not_count(run):
    with run.world(keep_in_ram=ALL) as opened:
        run.save(opened, *range(1, 4), line=1)
        (slot,) = (run.path / "ram" / "hosts").iterdir()
        (last,) = (each for each in slot.iterdir() if each.name.startswith("3-"))
        shutil.rmtree(last / "state")
        # Stored values of step 3 are lost in RAM and in storage.
        shutil.rmtree(run.path / "steps" / "3" / "state")
    with run.world(keep_in_ram=ALL) as opened:
        assert value(opened.load(None)) == 102
        parent = (opened.latest.step, opened.latest.save)
        run.save(opened, 3, line=2)
        assert opened.latest.line == (parent, (3, opened.latest.save))
    assert run.newest(keep_in_ram=ALL) == (3, 203)
    assert run.stock() == [(1, 101), (2, 102), (3, 203)]


def test_retention_prefers_what_it_promised_to_abandoned_steps(run):
    with run.world(keep=policies.LatestN(3), keep_in_ram=ALL) as opened:
        run.save(opened, *range(1, 7), line=1)
    with run.world(keep=policies.LatestN(3), keep_in_ram=policies.LatestN(2)) as opened:
        opened.load(4)
        run.save(opened, 5, line=2)
        assert [step for step, _ in run.stock()] == [4, 5]
        assert run.set_aside() == [6]
        run.save(opened, 6, 7, line=2)
    assert run.stock() == [(5, 205), (6, 206), (7, 207)]
    assert run.set_aside() == []
    names = os.listdir(run.path / "ram" / "hosts" / "0")
    assert sorted(n.partition("-")[0] for n in names if n != "lock") == ["6", "7"]


def test_steps_of_plain_orbax_are_abandoned_too(run):
    with ocp.training.Checkpointer(run.path / "steps") as stock:
        for step in (1, 2, 3):
            stock.save(step, {"w": jnp.full(4, 100 + step)})
    with run.world() as opened:
        assert opened.latest.step == 3
        opened.load(1, {"w": jnp.zeros(4, jnp.int32)})
        run.save(opened, 2, line=2)
    assert run.newest() == (2, 202)
    assert run.stock() == [(1, 101), (2, 202)]


LARGE = {"w": jnp.full(100_000, 202)}


def test_an_overwrite_that_does_not_fit_into_ram_replaces_what_is_there(run):
    with run.world(limit_bytes=300_000) as opened:
        run.save(opened, 2, line=1)
        assert opened.save(2, LARGE, overwrite=True)
    assert run.newest() == (2, 202)
    assert run.stock() == run.steps() == [(2, 202)]


def test_only_the_newest_step_is_overwritten(run):
    with run.world() as opened:
        run.save(opened, 1, 2, 3, line=1)
        with pytest.raises(
            errors.CheckpointError, match="only the newest step can, which is 3"
        ):
            opened.save(2, {"w": jnp.full(4, 202)}, overwrite=True)
    assert run.stock() == run.steps() == [(1, 101), (2, 102), (3, 103)]


def test_where_steps_are_written_in_place_they_are_copied_aside(run, monkeypatch):
    in_place = lambda path: persistent_root.PersistentRoot(  # noqa: E731
        path=storage.absolute(path), in_place=True
    )
    monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", in_place)
    with run.world() as opened:
        run.save(opened, *range(1, 5), line=1)
        opened.load(2)
        run.save(opened, 3, line=2)
    assert run.set_aside() == [3, 4]
    run.lose_ram()
    assert run.steps() == [(1, 101), (2, 102), (3, 203)]
    with run.world() as opened:
        assert value(opened.load(4)) == 104
        run.save(opened, 5, line=1)
    assert run.set_aside() == [3]
    run.lose_ram()
    assert run.steps() == [(1, 101), (2, 102), (3, 103), (4, 104), (5, 105)]


def test_what_a_line_abandons():
    current = line.Line(save="5", parents=((3, "1"), (6, "3")))
    assert not current.abandons(StepId(3, "1"))
    assert current.abandons(StepId(4, "1"))
    assert not current.abandons(StepId(6, "3"))
    assert current.abandons(StepId(7, "3"))
    # Saves that the line did not go on from.
    assert current.abandons(StepId(2, "2"))
    assert current.abandons(StepId(2, "4"))
    # The parent of the oldest save is unknown.
    assert not current.abandons(StepId(3, "0"))
    assert current.abandons(StepId(4, "0"))
    # Its own steps, and newer saves.
    assert not current.abandons(StepId(7, "5"))
    assert not current.abandons(StepId(7, "6"))
    assert not line.Line(save="5", parents=()).abandons(StepId(9, "1"))
