"""Our checkpointer has all that Orbax's has, under the same names."""

import inspect

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import factory
from elastic_ckpt.checkpoint.checkpointer import Checkpointer
from elastic_ckpt.core import errors
from elastic_ckpt.host.answers import CheckpointMetadata
from elastic_ckpt.tiers.choices import Local, Persistent

THEIRS = {
    name: member
    for name, member in vars(ocp.training.Checkpointer).items()
    # Members that Orbax itself deprecates are left out.
    if not name.startswith("_") and not hasattr(member, "__deprecated__")
}


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_what_orbax_has_is_there(name):
    theirs, ours = THEIRS[name], getattr(Checkpointer, name)
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(theirs, property):
        return
    wanted = inspect.signature(theirs).parameters
    ours_takes = inspect.signature(ours).parameters
    takes_more = any(each.kind is each.VAR_KEYWORD for each in ours_takes.values())
    for parameter in wanted.values():
        if (
            parameter.name not in ours_takes
            and parameter.kind is parameter.KEYWORD_ONLY
        ):
            assert takes_more, parameter
            continue
        mine = ours_takes[parameter.name]
        assert mine.kind == parameter.kind, parameter
        assert mine.default == parameter.default, parameter
    positional = [
        [
            each.name
            for each in parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        for parameters in (wanted, ours_takes)
    ]
    assert positional[0] == positional[1]


def test_a_step_has_what_one_of_orbax_has():
    theirs = {
        name
        for name in dir(ocp.training.CheckpointMetadata)
        if not name.startswith("_")
    }
    ours = set(CheckpointMetadata.__dataclass_fields__)
    assert theirs <= ours | set(dir(CheckpointMetadata))


@pytest.fixture(params=["storage", "ram and storage"])
def both(request, tmp_path):
    """Our checkpointer and Orbax's, each with its own directory."""
    tiers = [Persistent(tmp_path / "ours", every=1)]
    if request.param != "storage":
        tiers.append(Local(tmp_path / "ram"))
    with (
        factory.Checkpointer(tiers) as ours,
        ocp.training.Checkpointer(tmp_path / "theirs") as theirs,
    ):
        yield ours, theirs


def test_what_is_listed_has_path_metrics_and_time(both):
    for checkpointer in both:
        for step in (1, 2):
            checkpointer.save(step, {"n": step}, metrics={"loss": 1 / step})
            checkpointer.wait()
    ours, theirs = both
    for entry in [*ours.checkpoints, ours.latest]:
        assert entry.path == ours.directory / str(entry.step)
        assert entry.metrics == {"loss": 1 / entry.step}
        assert abs((entry.time - theirs.latest.time).total_seconds()) < 600
        assert entry.commit_timestamp == entry.time
        assert entry.metadata is None
    assert [each.step for each in ours.checkpoints] == [1, 2]
    assert ours.root_metadata() == ocp.training.RootMetadata(directory=ours.directory)
    assert theirs.root_metadata().custom_metadata in (None, {})


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_what_goes_on_in_the_background_comes_to_the_same(both):
    ours, _ = both
    for step in (1, 2, 3):
        ours.save(step, {"n": step})
        ours.wait()
    seen = []
    response = ours.load_async(2, {"n": 0})
    response.on_complete(seen.append)
    assert response.result(60) == {"n": 2}
    assert ours.load_checkpointables_async(1).result() == {"state": {"n": 1}}
    assert ours.delete_async(2).result()
    assert [each.step for each in ours.checkpoints] == [1, 3]
    assert ours.latest.step == 3
    assert not ours.delete_async(2, missing_ok=True).result()
    with pytest.raises(ocp.training.errors.StepNotFoundError, match="step 2 is in no"):
        ours.delete_async(2).result()
    with pytest.raises(errors.CheckpointError, match="'state' of step 3 cannot be del"):
        ours.delete(3, checkpointable_name="state")
    ours.cancel(3)
    assert ours.latest.step == 1
    ours.wait()
    assert seen == [{"n": 2}]


def test_a_save_that_is_cancelled_leaves_nothing(both):
    ours, _ = both
    ours.save_async(1, {"n": 1})
    ours.cancel(1)
    assert ours.checkpoints == []
    ours.cancel()
    assert ours.latest is None


def test_orbax_s_own_entry_names_a_step(both):
    ours, theirs = both
    for checkpointer in both:
        checkpointer.save(1, {"n": 1})
    assert ours.load(theirs.latest, {"n": 0}) == {"n": 1}
    assert ours.metadata(theirs.latest).step == 1


def test_listing_waits_for_nothing_and_starts_nothing(both, monkeypatch):
    ours, _ = both
    ours.save(1, {"n": 1})
    ours.wait()
    monkeypatch.setattr(ours._steps.stages, "wait", pytest.fail)
    monkeypatch.setattr(ours._steps.stages, "wait_for_commit", pytest.fail)
    assert [each.step for each in ours.checkpoints] == [1]
    monkeypatch.undo()
