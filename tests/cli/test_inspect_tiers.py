"""`elastic-ckpt inspect` of tiers: steps, and who holds them."""

import contextlib
import json
import re

import numpy as np

from elastic_ckpt.core import boxes, digest, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.training import schema
from tests import runs, shared_memory
from tests.tiers import tiered_steps

STATE = {"w": np.arange(32, dtype=np.float32).reshape(4, 8)}


def save(root, rows, *, step=3):
    """A machine that holds some rows of `w`."""
    disk = ram_disk.RamDisk(root, run=tiered_steps.RUN)
    contents = manifest.Contents(
        leaves=(
            manifest.Leaf(path="state/w", shape=(4, 8), dtype="float32", chunk=(1, 8)),
        )
    )
    with contextlib.closing(
        local.LocalHost(disk, slot=0, domains={}, number=0)
    ) as host:
        writer = host.begin(StepId(step, "0"), contents)
        for row in rows:
            values = STATE["w"][row : row + 1]
            box = boxes.Box(start=(row, 0), stop=(row + 1, 8))
            content = values.reshape(-1).view(np.uint8)
            writer.put(
                *(0, box, digest.values_digest(values)),
                lambda into, content=content: np.copyto(into, content),
            )
        writer.commit()
    return disk.machine


def inspect(*arguments):
    return json.loads(runs.verb("inspect", *arguments, "--json"))


def test_it_tells_leftovers_preserved_steps_and_those_of_plain_orbax(tmp_path):
    ram, steps = tmp_path / "ram", tmp_path / "steps"
    with tiered_steps.checkpointer(ram, steps, every=2) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
    preserved.pin(steps / "2")
    storage.make_directory(steps / "5")
    half = storage.make_directory(ram / "hosts" / "0" / "4-000000000000007")
    unfinished = storage.make_directory(steps / "9.orbax-checkpoint-tmp-x")
    printed = inspect(ram, steps)
    shown = {each["step"]: each for each in printed["steps"]}
    assert list(shown) == [2, 5]
    assert shown[2]["preserved"]
    assert [each["tier"] for each in shown[2]["tiers"]] == ["local", "persistent"]
    assert shown[5]["save"] == ""
    assert [each["path"] for each in printed["leftovers"]] == [
        str(half),
        str(unfinished),
    ]
    text = runs.verb("inspect", ram, steps, "--all")
    assert "step 2: complete, preserved\n" in text
    assert "step 5: saved by stock Orbax, without manifests\n" in text
    assert f"step 4 is being written, or was interrupted: {half}\n" in text


def test_of_a_run_it_shows_one_step_briefly_one_that_is_asked_for_and_all(tmp_path):
    runs.write_record(tmp_path, schema.Config())
    assert runs.verb("inspect", tmp_path) == "no run: 0 steps\n"
    steps = tmp_path / "checkpoints"
    with tiered_steps.checkpointer(tmp_path / "ram", steps) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2, 3)

    def shown(*arguments):
        text = runs.verb("inspect", tmp_path, *arguments)
        named = re.findall(r"^step (\d+): complete", text, re.M)
        return ["".join(named), text.count(" arrays, "), text.count("  params/w ")]

    assert shown() == ["3", 1, 0]
    assert shown("--step", 2) == ["2", 1, 1]
    assert shown("--all") == ["123", 3, 1]
    of_step = inspect(tmp_path, "--step", 2)
    assert [each["step"] for each in of_step["steps"]] == [2]
    assert of_step["known"] == [1, 2, 3]
    output = runs.verb("inspect", tmp_path, "--step", 7, code=1)
    assert (
        "there is no step 7 in these locations; they contain steps [1, 2, 3]" in output
    )


def test_of_a_run_it_shows_the_steps_in_this_machines_ram(tmp_path):
    with shared_memory.directory("inspect") as ram:
        tiers = schema.TiersSection(
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=1,
            multi_tier_checkpointing_backup_interval_steps=2,
        )
        named = schema.RunSection(run_name="tiny")
        config = schema.Config(run=named, tiers=tiers)
        runs.write_record(tmp_path, config)
        disk, steps = f"{ram}/tiny", tmp_path / "checkpoints"
        with tiered_steps.checkpointer(disk, steps, every=2) as checkpointer:
            tiered_steps.save(checkpointer, 1, 2, 3)
        # With the RAM disk named, too, each is looked at once.
        for paths in ([tmp_path], [tmp_path, disk]):
            listed = inspect(*paths)["steps"]
            shown = {each["step"]: each["tiers"] for each in listed}
            assert [each["tier"] for each in shown[2]] == ["persistent"]
            (in_ram,) = shown[3]
            assert in_ram["tier"] == "local"
            assert len(in_ram["holders"]) == 1
        text = runs.verb("inspect", tmp_path)
        assert "run run-7: 2 steps: 2, 3\nstep 3: complete" in text
        assert "step 3: complete, 12 copies" in runs.verb("verify", tmp_path)


def test_step_that_is_not_whole_is_shown_beside_the_newest_that_is(tmp_path):
    # Row 3 is on one machine alone.
    paths = [tmp_path / name for name in "abc"]
    held = [(0, 1, 2), (2, 1), (3, 0, 2)]
    ids = [save(path, rows) for path, rows in zip(paths, held, strict=True)]
    (step,) = inspect(*paths)["steps"]
    assert (step["step"], step["save"], step["problem"]) == (3, "0", None)
    (tier,) = step["tiers"]
    assert tier["holders"] == sorted(f"{each}.0" for each in ids)
    save(paths[0], (0, 1), step=4)
    save(paths[0], range(4), step=2)
    text = runs.verb("inspect", *paths)
    assert "run run-7: 3 steps: 2, 3, 4\n" in text
    assert "step 4: incomplete: lacks parts of 1 of 1 arrays and files" in text
    assert "step 3: complete" in text
    assert "step 2: " not in text
    (problem,) = inspect(*paths[:2], "--step", 3)["steps"]
    missing = "lacks parts of 1 of 1 arrays and files: [state/w[3:4, 0:8]]"
    assert problem["problem"] == missing


def test_it_shows_the_line_of_a_run_and_the_one_that_was_abandoned(tmp_path):
    roots = (tmp_path / "ram", tmp_path / "steps")
    with tiered_steps.checkpointer(*roots) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2, 3)
    with tiered_steps.checkpointer(*roots) as checkpointer:
        checkpointer.load_checkpointables(
            1, {"data": tiered_steps.Cursors()}, roll_back=True
        )
        tiered_steps.save(checkpointer, 2)
    printed = inspect(*roots)
    steps = {(each["step"], each["abandoned"]): each for each in printed["steps"]}
    assert sorted(steps) == [(1, False), (2, False), (3, True)]
    assert steps[1, False]["parent"] is steps[3, True]["parent"] is None
    assert steps[2, False]["parent"] == [1, steps[1, False]["save"]]
    printed = runs.verb("inspect", *roots)
    line, abandoned = printed.split("abandoned, because")
    assert "step 2: complete, continues from step 1\n" in line
    assert "step 3" not in line
    assert "step 3: complete\n" in abandoned
    # Each is verified where it lies.
    assert "PASSED" in runs.verb("verify", *roots)
