from elastic_ckpt.tiers import preserved
from tests import runs
from tests.tiers import tiered_steps


def test_steps_are_pinned_in_every_tier_and_given_back(tmp_path):
    ram, steps = tmp_path / "ram", tmp_path / "steps"
    with tiered_steps.checkpointer(ram, steps) as checkpointer:
        tiered_steps.save(checkpointer, 1)
    (in_ram,) = (ram / "hosts" / "0").glob("1-*")
    paths = [in_ram, steps / "1"]
    output = runs.verb("pin", steps / "1", steps / "1" / "state", code=1)
    assert "state is not a step directory" in output
    assert not preserved.is_preserved(steps / "1")
    output = runs.verb("pin", *paths)
    assert output == f"{in_ram}: pinned\n{steps}/1: pinned\n"
    assert all(map(preserved.is_preserved, paths))
    assert runs.verb("verify", ram, steps).endswith("saved\n")
    runs.verb("pin", "--undo", *paths)
    assert not any(map(preserved.is_preserved, paths))
