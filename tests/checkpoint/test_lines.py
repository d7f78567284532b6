"""Runs that go back to an older step, or save one anew: which saves count then.

`tests/model` goes back and overwrites in random histories, and crashes at each change.
"""

import contextlib
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import claims, persistent_root
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

policies = ocp.training.preservation_policies
ALL = policies.PreserveAll()


class Run:
    """Worlds of one run, one after the other; the state of a step is a number."""

    def __init__(self, path):
        self.path = path

    def world(self, *, ram="ram", **options):
        ram, steps = self.path / ram, self.path / "steps"
        return tiered_steps.checkpointer(ram, steps, **options)

    def save(self, opened, *steps, line, **options):
        for step in steps:
            state = {"w": jnp.full(4, 100 * line + step)}
            assert opened.save(step, state, **options)
            opened.wait()

    def steps(self, **options):
        """The steps that a new world finds, with their values."""
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


def value(state):
    (number,) = set(np.asarray(state["w"]).tolist())
    return number


def old(*steps):
    return [(step, 100 + step) for step in steps]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def start(name):
    """A start of the run, which claims its worlds."""
    return {"world": run_world.RunWorld(claimant=claims.Claimant(name=name))}


@pytest.mark.parametrize("steps", [[], [1, 2, 3]])
def test_saves_of_a_replaced_start_do_not_count(run, steps):
    ended = contextlib.suppress(errors.ReplacedError)
    with ended, run.world(ram="of-a", **start("a")) as replaced:
        run.save(replaced, *steps, line=1)
        with run.world(ram="of-b", **start("b")) as new:
            assert [replaced.claim_world(), new.claim_world()] == [1, 2]
            # The old start saves on, until it is to commit a step to storage.
            for step in (4, 5):
                with pytest.raises(errors.ReplacedError, match="b, has continued it"):
                    run.save(replaced, step, line=1)
            assert [each.step for each in new.checkpoints] == steps
            run.save(new, 4, line=2)
        assert replaced.latest.step == 4
        replaced.wait()
    # Also where the memory of the old start is.
    assert run.steps(ram="of-a") == run.stock() == [*old(*steps), (4, 204)]


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
    assert run.steps() == run.stock() == old(*range(1, 8))
    assert run.set_aside() == [5]


def test_a_fallback_names_its_parent_and_the_incomplete_step_does_not_count(run):
    with run.world(keep_in_ram=ALL) as opened:
        run.save(opened, *range(1, 4), line=1)
        # Stored values of step 3 are lost in RAM and in storage.
        for step in (*run.path.glob("ram/hosts/*/3-*"), run.path / "steps" / "3"):
            shutil.rmtree(step / "state")
    with run.world(keep_in_ram=ALL) as opened:
        assert value(opened.load(None)) == 102
        parent = (opened.latest.step, opened.latest.save)
        run.save(opened, 3, line=2)
        assert opened.latest.line == (parent, (3, opened.latest.save))
    assert run.steps(keep_in_ram=ALL) == run.stock() == [*old(1, 2), (3, 203)]


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
    assert run.steps() == run.stock() == [(1, 101), (2, 202)]


def test_only_the_newest_step_is_overwritten_whether_it_fits_into_ram_or_not(run):
    with run.world(limit_bytes=300_000) as opened:
        run.save(opened, 1, 2, line=1)
        with pytest.raises(
            errors.CheckpointError, match="only the newest step can, which is 2"
        ):
            run.save(opened, 1, line=2, overwrite=True)
        assert opened.save(2, {"w": jnp.full(100_000, 202)}, overwrite=True)
    assert run.stock() == run.steps() == [(1, 101), (2, 202)]


def test_where_steps_are_written_in_place_they_are_copied_aside(run, monkeypatch):
    def in_place(path):
        return persistent_root.PersistentRoot(
            path=storage.absolute(path), in_place=True
        )

    monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", in_place)
    with run.world() as opened:
        run.save(opened, *range(1, 5), line=1)
        opened.load(2)
        run.save(opened, 3, line=2)
    assert run.set_aside() == [3, 4]
    shutil.rmtree(run.path / "ram")
    assert run.steps() == [*old(1, 2), (3, 203)]
    with run.world() as opened:
        assert value(opened.load(4)) == 104
        run.save(opened, 5, line=1)
    assert run.set_aside() == [3]
    shutil.rmtree(run.path / "ram")
    assert run.steps() == old(1, 2, 3, 4, 5)


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
