"""Which steps a checkpointer keeps in persistent storage and in RAM."""

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests.recorded_events import RecordedEvents
from tests.tiers import tiered_steps, uploaded

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

policies = ocp.training.preservation_policies


def stored(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    return root.steps()


def in_ram(tmp_path):
    names = (path.name for path in (tmp_path / "ram" / "hosts" / "0").iterdir())
    return sorted(int(name.partition("-")[0]) for name in names if name != "lock")


def opened(tmp_path, **options):
    return tiered_steps.checkpointer(tmp_path / "ram", tmp_path / "steps", **options)


BEST = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=1)


@pytest.mark.parametrize(
    ("keep", "keep_in_ram", "kept", "kept_in_ram"),
    [
        (None, BEST, [1, 2, 3, 4], [2, 4]),
        (BEST, policies.EveryNSteps(2), [2, 4], [2, 4]),
        (policies.LatestN(2), policies.EveryNSeconds(10**6), [3, 4], [1, 4]),
    ],
)
def test_policies_of_orbax_decide_what_stays_in_each_tier_also_over_a_new_world(
    tmp_path, keep, keep_in_ram, kept, kept_in_ram
):
    for steps in ([1, 2], [3, 4]):
        with opened(tmp_path, keep=keep, keep_in_ram=keep_in_ram) as checkpointer:
            for step in steps:
                loss = abs(step - 2.2)
                tiered_steps.save(checkpointer, step, metrics={"loss": loss})
    assert stored(tmp_path) == kept
    assert in_ram(tmp_path) == kept_in_ram
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    assert root.leftovers() == []


def test_what_is_preserved_by_hand_stays_in_ram_over_a_new_world(tmp_path):
    with opened(tmp_path, every=100) as checkpointer:
        tiered_steps.save(checkpointer, 1)
        (step,) = (tmp_path / "ram" / "hosts" / "0").glob("1-*")
        preserved.pin(step)
        tiered_steps.save(checkpointer, 2, 3)
        assert in_ram(tmp_path) == [1, 3]
    # A new world removes old steps, and respects the mark.
    with opened(tmp_path, every=100) as checkpointer:
        tiered_steps.save(checkpointer, 4)
        assert in_ram(tmp_path) == [1, 4]
        preserved.unpin(step)
        tiered_steps.save(checkpointer, 5)
    assert in_ram(tmp_path) == [5]


def test_steps_of_others_and_the_step_of_a_damaged_newer_one_stay(tmp_path):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")
    # Orbax alone saved step 0.
    storage.make_directory(root.final(0) / "state")
    tiers = {"keep": policies.LatestN(1)}
    ram = tmp_path / "ram"
    with tiered_steps.checkpointer(ram, root.path, run="x", **tiers) as checkpointer:
        # Step 1 is another run's.
        saved = uploaded.saved_step(1)
        uploaded.write_all(root, saved, uploaded.hosts(2))
        uploaded.commit_all(root, saved, uploaded.hosts(2))
        assert persistent_tier.PersistentTier(root, run="x").steps() == [1]
        tiered_steps.save(checkpointer, 2, 3)
    assert stored(tmp_path) == [0, 1, 3]


def test_storage_that_is_away_or_refuses_is_told_and_training_goes_on(
    tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(5, "storage is away")

    recorded = RecordedEvents()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "Presence", refuse)
        with opened(tmp_path, keep=policies.LatestN(1), emit=recorded) as checkpointer:
            tiered_steps.save(checkpointer, 1)
            assert in_ram(tmp_path) == [1]
            # A backup that others do not know of could be taken for a dead one.
            assert stored(tmp_path) == []
            patch.undo()
            patch.setattr(persistent_tier.PersistentTier, "remove", refuse)
            tiered_steps.save(checkpointer, 2, 3)
    # Steps that cannot be removed are told, and the backups count.
    assert stored(tmp_path) == [2, 3]
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 3]
    told = recorded.named("degraded")
    assert "leftovers were not removed: host 0: [Errno 5] storage" in told[0]["why"]
    assert told[-1]["step"] == 3
