"""Our checkpointer has all that Orbax's has, under the same names."""

import inspect
import pathlib

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.core import errors
from elastic_ckpt.frontend import Checkpointer
from elastic_ckpt.tiers.choices import Local, Persistent

MEMBERS = {
    name: member
    for name, member in vars(ocp.training.Checkpointer).items()
    if not name.startswith("_")
}
# Orbax's former names, by what they are called now.
FORMER = {
    name: name.replace("_pytree", "").replace("pytree_", "")
    for name, member in MEMBERS.items()
    if hasattr(member, "__deprecated__")
}
THEIRS = {name: member for name, member in MEMBERS.items() if name not in FORMER}


def positional(parameters):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in parameters.values() if each.kind is kind]


def test_what_orbax_has_is_there():
    for name, theirs in THEIRS.items():
        ours = getattr(Checkpointer, name)
        assert isinstance(ours, property) == isinstance(theirs, property)
        if isinstance(theirs, property):
            continue
        wanted = inspect.signature(theirs).parameters
        takes = inspect.signature(ours).parameters
        takes_more = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        for parameter in wanted.values():
            if parameter.name in takes or parameter.kind is not parameter.KEYWORD_ONLY:
                mine = takes[parameter.name]
                assert mine.kind == parameter.kind, (name, parameter)
                assert mine.default == parameter.default, (name, parameter)
            else:
                assert takes_more, (name, parameter)
        assert positional(wanted) == positional(takes), name
    of_step = {
        name
        for name in dir(ocp.training.CheckpointMetadata)
        if not name.startswith("_")
    }
    ours = set(CheckpointMetadata.__dataclass_fields__)
    assert of_step <= ours | set(dir(CheckpointMetadata))


# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(params=["ram and storage"])
def both(request, tmp_path):
    """Our checkpointer and Orbax's, each with its own directory."""
    tiers = [Persistent(tmp_path / "ours", every=1)]
    if request.param != "storage":
        tiers.append(Local(tmp_path / "ram"))
    with (
        frontend.Checkpointer(tiers) as ours,
        ocp.training.Checkpointer(tmp_path / "theirs") as theirs,
    ):
        yield ours, theirs


def test_what_is_listed_has_path_metrics_and_time_and_names_a_step(both):
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
    assert ours.load(theirs.latest, {"n": 0}) == {"n": 2}
    assert ours.metadata(theirs.latest).step == 2


@pytest.mark.parametrize("both", ["storage", "ram and storage"], indirect=True)
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
    with pytest.raises(
        ocp.training.errors.StepNotFoundError, match="step 2 is not in any tier"
    ):
        ours.delete_async(2).result()
    with pytest.raises(errors.CheckpointError, match="'state' of step 3 cannot be del"):
        ours.delete(3, checkpointable_name="state")
    ours.cancel(3)
    assert ours.latest.step == 1
    ours.wait()
    assert seen == [{"n": 2}]


def test_former_names_do_what_the_present_ones_do(both):
    ours, _ = both
    assert ours.save_pytree(1, {"n": 1}, metrics={"loss": 0.5})
    assert ours.save_pytree_async(2, {"n": 2}, custom_metadata={"a": 1}).result()
    ours.wait()
    assert ours.load_pytree() == {"n": 2}
    assert ours.load_pytree(1, {"n": 0}) == {"n": 1}
    assert ours.load_pytree_async(1).result() == {"n": 1}
    assert ours.pytree_metadata(1).metadata == {"n": 0}
    assert ours.pytree_metadata().custom_metadata == {"a": 1}


def partial():
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    return context


def test_a_context_has_parts_loaded(both, tmp_path):
    ours, theirs = both
    tree, part = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 0}}
    for checkpointer in both:
        checkpointer.save(1, tree)
        checkpointer.wait()
    with partial():
        assert theirs.load(1, part) == {"b": {"d": 3}}
    with partial():
        # Also in the thread of a load in the background.
        assert ours.load(1, part) == {"b": {"d": 3}}
        assert ours.load_async(1, part).result() == {"b": {"d": 3}}
        response = ours.load_checkpointables_async(1, {"state": part})
    assert response.result() == {"state": {"b": {"d": 3}}}
    # A context of the checkpointer.
    for directory in ("ours", "theirs"):
        tiers = [Persistent(tmp_path / directory, every=1)]
        with frontend.Checkpointer(tiers, context=partial()) as checkpointer:
            assert checkpointer.load(1, part) == {"b": {"d": 3}}


def context_with(option, value):
    context = ocp.Context()
    *groups, last = option.split(".")
    options = context
    for group in groups:
        options = getattr(options, group)
    setattr(options, last, value)
    return context


def test_options_that_would_be_ignored_are_refused_by_name_and_others_are_taken(both):
    ours, _ = both
    assert ours.save(1, {"n": 1})
    layout = ocp.options.CheckpointLayout.SAFETENSORS

    def save():
        ours.save(2, {"n": 2})

    def load():
        ours.load_async(1)

    for option, value, call in (
        ("array.saving.use_zarr3", False, save),
        ("array.saving.storage_options.dtype", "bfloat16", save),
        ("file.path_class", pathlib.Path, save),
        ("multiprocessing.primary_host", None, save),
        ("checkpoint_layout", layout, save),
        ("checkpoint_layout", layout, load),
        ("array.loading.enable_padding_and_truncation", True, load),
        (
            "deletion.gcs_deletion_options.todelete_full_path",
            "trash",
            lambda: ours.delete(1),
        ),
    ):
        context = context_with(option, value)
        named = option.replace(".", ".*")
        with context, pytest.raises(errors.CheckpointError, match=named):
            call()
    with context_with("memory.write_concurrent_bytes", 2**20):
        assert ours.save(2, {"n": 2})
        assert ours.load(2) == {"n": 2}
        assert ours.delete(2)
