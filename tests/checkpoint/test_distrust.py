"""A step that came from RAM and is distrusted: which step counts then, and for whom."""

import shutil

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.core import storage
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import claims
from tests.checkpoint.test_component_io import Counter
from tests.recorded_events import RecordedEvents

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


class Run:
    """Processes of one run, one after the other; the state of a step is a number."""

    def __init__(self, path):
        self.path = path

    def open(self, name=None):
        keep = ocp.training.preservation_policies.PreserveAll()
        tiers = [Local(self.path / "ram", every=1, keep=keep)]
        tiers.append(Persistent(self.path / "steps", every=2))
        self.recorded = RecordedEvents()
        world = run_world.ALONE
        if name:
            world = run_world.RunWorld(claimant=claims.Claimant(name=name))
        return frontend.Checkpointer(tiers, run="run", emit=self.recorded, world=world)

    def save(self, checkpointer, *steps, line=1):
        for step in steps:
            parts = {"state": {"w": jnp.full(4, 100 * line + step)}, "data": Counter()}
            assert checkpointer.save_checkpointables(step, parts)
            checkpointer.wait()

    def load(self, checkpointer, step=None):
        """Loads a step with its data; returns the number in its state."""
        wanted = {"state": None, "data": Counter()}
        state = checkpointer.load_checkpointables(step, wanted)["state"]
        (number,) = set(map(int, state["w"]))
        return number

    def distrusted(self):
        return self.recorded.named("restore_distrusted")


@pytest.fixture
def run(tmp_path):
    """A run with the steps 1 to 5 in RAM, of which 2 and 4 are in storage."""
    run = Run(tmp_path)
    with run.open() as checkpointer:
        run.save(checkpointer, 1, 2, 3, 4, 5)
    return run


@pytest.mark.parametrize(
    ("is_memory_lost", "names"), [(False, ("a", "b")), (True, (None, None))]
)
def test_the_newest_earlier_step_in_storage_is_gone_on_from(run, is_memory_lost, names):
    with run.open(names[0]) as checkpointer:
        assert run.load(checkpointer) == 105
        run.save(checkpointer, 6)
        back = checkpointer.distrust(7, why="the loss is nan")
        assert back == checkpointer.latest
        assert back.step == 4
        assert run.distrusted() == [
            {"step": 7, "restored_step": 5, "to_step": 4, "why": "the loss is nan"}
        ]
    # It is on record before anything is saved or loaded.
    if is_memory_lost:
        shutil.rmtree(run.path / "ram")
    with run.open(names[1]) as checkpointer:
        assert run.load(checkpointer) == 104
        run.save(checkpointer, 5, 6, line=2)
    with run.open() as checkpointer:
        assert run.load(checkpointer) == 206
        assert run.load(checkpointer, 5) == 205


def test_a_step_from_ram_is_distrusted_once_and_soon_after_it_was_loaded(run):
    with run.open() as checkpointer:
        assert checkpointer.distrust(6) is None
        run.load(checkpointer)
        assert checkpointer.distrust(8, within=3).step == 4
        # Step 4 is in RAM as well.
        assert run.load(checkpointer) == 104
        assert checkpointer.distrust(6) is None
        assert checkpointer.latest.step == 4
        run.save(checkpointer, 5, 6, line=2)
        # Another load, whose arrays stayed on the devices.
        checkpointer.load_checkpointables(5, {"data": Counter()})
        assert checkpointer.distrust(6).step == 4
    assert len(run.distrusted()) == 2
    with run.open() as checkpointer:
        # The step itself does not count, though it is in storage.
        run.load(checkpointer, 4)
        assert checkpointer.distrust(5).step == 2
        run.load(checkpointer, 4)
        assert checkpointer.distrust(8, within=3) is None
    shutil.rmtree(run.path / "ram")
    with run.open() as checkpointer:
        # A step from storage is not distrusted.
        run.load(checkpointer, 4)
        assert checkpointer.distrust(5) is None
        assert checkpointer.latest.step == 4


def test_without_a_record_or_an_earlier_step_nothing_changes_but_it_is_said(
    run, monkeypatch
):
    with run.open() as checkpointer:
        run.load(checkpointer)
        create = storage.create

        def refuse(path, *arguments, **options):
            if "worlds" in str(path):
                raise PermissionError(13, "it is read-only", str(path))
            return create(path, *arguments, **options)

        monkeypatch.setattr(storage, "create", refuse)
        assert checkpointer.distrust(6) is None
        assert checkpointer.latest.step == 5
        (event,) = run.recorded.named("degraded")
        assert event["why"].startswith("the run does not go back to storage: ")
        monkeypatch.setattr(storage, "create", create)
    with run.open() as checkpointer:
        run.load(checkpointer, 2)
        assert checkpointer.distrust(3) is None
        (event,) = run.distrusted()
        assert event["to_step"] is None
