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
from tests.checkpoint.test_looking_back import Counter
from tests.recorded_events import RecordedEvents

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

WANTED = {"state": None, "data": Counter()}
DATA = {"data": Counter()}


class Run:
    """Processes of one run, one after the other; the state of a step is a number."""

    def __init__(self, path):
        self.path = path

    def open(self, *, every=2, stored=True, emit=None, **options):
        keep = ocp.training.preservation_policies.PreserveAll()
        tiers = [Local(self.path / "ram", every=1, keep=keep)]
        if stored:
            tiers.append(Persistent(self.path / "steps", every=every))
        self.recorded = RecordedEvents()
        emit = emit or self.recorded
        return frontend.Checkpointer(tiers, run="run", emit=emit, **options)

    def save(self, checkpointer, *steps, line=1):
        for step in steps:
            parts = {"state": {"w": jnp.full(4, 100 * line + step)}, "data": Counter()}
            assert checkpointer.save_checkpointables(step, parts)
            checkpointer.wait()

    def load(self, checkpointer, step=None):
        """Loads a step with its data; returns the number in its state."""
        state = checkpointer.load_checkpointables(step, WANTED)["state"]
        (number,) = set(map(int, state["w"]))
        return number

    def distrusted(self):
        return self.recorded.named("restore_distrusted")

    def lose_ram(self):
        shutil.rmtree(self.path / "ram")


@pytest.fixture
def run(tmp_path):
    """A run with the steps 1 to 5 in RAM, of which 2 and 4 are in storage."""
    run = Run(tmp_path)
    with run.open() as checkpointer:
        run.save(checkpointer, 1, 2, 3, 4, 5)
    return run


def test_the_newest_earlier_step_in_storage_is_gone_on_from(run):
    with run.open() as checkpointer:
        assert run.load(checkpointer) == 105
        run.save(checkpointer, 6)
        back = checkpointer.distrust(7, why="the loss is nan")
        assert back == checkpointer.latest
        assert back.step == 4
        assert run.distrusted() == [
            {"step": 7, "restored_step": 5, "to_step": 4, "why": "the loss is nan"}
        ]
        assert run.load(checkpointer) == 104
        run.save(checkpointer, 5, 6, line=2)
    with run.open() as checkpointer:
        assert run.load(checkpointer) == 206
        assert [each.step for each in checkpointer.checkpoints] == [1, 2, 3, 4, 5, 6]
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


@pytest.mark.parametrize("is_memory_lost", [False, True])
@pytest.mark.parametrize("claims_worlds", [False, True])
def test_it_is_on_record_before_anything_is_saved_or_loaded(
    run, is_memory_lost, claims_worlds
):
    def world(name):
        if not claims_worlds:
            return run_world.ALONE
        return run_world.RunWorld(claimant=claims.Claimant(name=name))

    with run.open(world=world("one")) as checkpointer:
        run.load(checkpointer)
        run.save(checkpointer, 6)
        assert checkpointer.distrust(7).step == 4
    if is_memory_lost:
        run.lose_ram()
    with run.open(world=world("two")) as checkpointer:
        assert checkpointer.latest.step == 4
        assert run.load(checkpointer) == 104
        run.save(checkpointer, 5, line=2)
    with run.open() as checkpointer:
        assert run.load(checkpointer) == 205


def test_a_step_from_storage_is_not_distrusted(run):
    with run.open() as checkpointer:
        run.save(checkpointer, 6)
    run.lose_ram()
    with run.open() as checkpointer:
        run.load(checkpointer, 6)
        assert checkpointer.distrust(7) is None
        assert checkpointer.latest.step == 6
    assert run.distrusted() == []


@pytest.mark.parametrize("stored", [False, True])
def test_without_an_earlier_step_in_storage_nothing_changes_but_it_is_said(
    tmp_path, stored
):
    run = Run(tmp_path)
    with run.open(every=3, stored=stored) as checkpointer:
        run.save(checkpointer, 1, 2, 3)
    with run.open(every=3, stored=stored) as checkpointer:
        run.load(checkpointer)
        assert checkpointer.distrust(4) is None
        assert checkpointer.latest.step == 3
        (event,) = run.distrusted()
        assert event["to_step"] is None
        run.save(checkpointer, 4)
    with run.open(every=3, stored=stored) as checkpointer:
        assert run.load(checkpointer) == 104


def test_a_damaged_step_in_storage_is_passed_over(run):
    manifests = list((run.path / "steps" / "4").rglob("manifest*"))
    assert manifests
    for manifest in manifests:
        manifest.unlink()
    shutil.rmtree(run.path / "steps" / "4" / "state")
    with run.open() as checkpointer:
        run.load(checkpointer)
        assert checkpointer.distrust(6).step == 2


@pytest.mark.parametrize("is_taken", [False, True])
def test_storage_that_takes_no_record_changes_nothing(run, monkeypatch, is_taken):
    with run.open() as checkpointer:
        run.load(checkpointer)
        create = storage.create

        def refuse(path, *arguments, **options):
            if "worlds" in str(path):
                if is_taken:
                    create(path, *arguments, **options)
                raise PermissionError(13, "it is read-only", str(path))
            return create(path, *arguments, **options)

        monkeypatch.setattr(storage, "create", refuse)
        assert checkpointer.distrust(6) is None
        assert checkpointer.latest.step == 5
        (event,) = run.recorded.named("degraded")
        assert event["why"].startswith("the run does not go back to storage: ")
        assert run.distrusted()[0]["to_step"] is None
        monkeypatch.setattr(storage, "create", create)
        run.save(checkpointer, 6)
    with run.open() as checkpointer:
        assert run.load(checkpointer) == 106
