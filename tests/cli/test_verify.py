"""`elastic-ckpt verify`: any damage of any copy is found, and named."""

import dataclasses
import json
import pathlib
import random
import shutil

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.inspect import tier_locations, verification
from elastic_ckpt.steps.manifest import Manifest, Parts, write_manifest
from elastic_ckpt.tiers.persistent import run_files
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.training import schema
from tests import runs
from tests.checkpoint import stock_program
from tests.tiers import served, tiered_steps


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A RAM disk, and two steps in storage, of which the second is in RAM too."""
    directory = tmp_path_factory.mktemp("kept")
    with tiered_steps.checkpointer(
        directory / "ram", directory / "steps"
    ) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
    return directory


@pytest.fixture
def saved(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "saved")
    return tmp_path / "saved"


def in_ram(saved, step=2):
    """The directory of the step in RAM."""
    (directory,) = (saved / "ram" / "hosts" / "0").glob(f"{step}-*")
    return directory


def flip(path, *, at=0, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


def verify(*paths, code=1):
    return json.loads(runs.verb("verify", *paths, "--json", code=code))


def problems(*paths):
    return verify(*paths)["problems"]


def test_all_is_well_in_any_mixture(saved):
    together = runs.verb("verify", saved / "ram", saved / "steps")
    assert together.splitlines()[-1] == "PASSED: every copy matches what was saved"
    run, before = saved / "run", contents(saved)
    for path in (saved / "ram", saved / "steps", saved / "steps" / "1"):
        assert verify(path, code=0)["passed"]
    assert contents(saved) == before
    one = verify(saved / "steps" / "1", code=0)
    assert [step["step"] for step in one["steps"]] == [1]
    assert runs.verb("verify", saved / "steps", "--step", 1).startswith("step 1:")
    # The directory of a run stands for its checkpoints.
    runs.write_record(run, schema.Config())
    (saved / "steps").rename(run / "checkpoints")
    assert verify(run, saved / "ram", code=0)["passed"]


def test_bit_in_ram_is_named_with_its_leaf_box_host_and_path(saved):
    path = in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0"
    flip(path, at=5, bit=6)
    (problem,) = problems(saved / "ram", saved / "steps")
    host = (saved / "ram" / machine.FILE).read_text() + ".0"
    assert problem["part"] == "state/params/w[6:8, 0:6]"
    assert (problem["kind"], problem["tier"]) == ("damaged", "local")
    assert (problem["holder"], problem["path"]) == (host, str(path))
    assert problem["remedy"].startswith("the persistent tier has a good copy")
    (alone,) = problems(saved / "ram")
    assert alone["remedy"].startswith("no good copy is left: restore an older step")
    removed = pathlib.Path(alone["remedy"].rpartition("remove the directory ")[2])
    assert removed.is_dir()
    assert removed in pathlib.Path(alone["path"]).parents
    assert "FAILED" in runs.verb("verify", saved / "ram", code=1)


def damages(directory):
    """Files with an appended byte, and with a flipped bit at a random place."""
    generator = random.Random(7)
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        content = path.read_bytes()
        yield path, content + b"}"
        if content:
            flipped = bytearray(content)
            at, bit = generator.randrange(len(content)), generator.randrange(8)
            flipped[at] ^= 1 << bit
            yield path, bytes(flipped)


def unnoticed(directory, *paths):
    """The damages that a verification passes over."""
    silent = []
    for path, damaged in damages(directory):
        before = path.read_bytes()
        path.write_bytes(damaged)
        if verified(*paths).passed(strict=True):
            silent.append((path, damaged))
        path.write_bytes(before)
    assert verified(*paths).passed(strict=True)
    return silent


def test_damage_of_any_file_of_a_host_is_noticed(saved):
    silent = unnoticed(saved / "ram" / "hosts" / "0", saved / "ram")
    # Nobody takes values by these.
    assert {path.name for path, _ in silent} <= {"zarr.json", "lock", "repairs.lock"}


@pytest.mark.slow
def test_damage_of_any_file_in_storage_is_noticed_or_nothing_to_orbax(saved):
    steps = saved / "steps"
    expected = loaded(steps)
    silent = unnoticed(steps / "2", steps)
    # Stores keep what they have replaced, that is in a file proves nothing, and the
    # merged store needs no index of a host's.
    names = {
        path.name
        for path, _ in silent
        if path.parent.name != "d" and not path.parent.name.startswith("ocdbt.process_")
    }
    assert names == {"commit_success.txt"}
    for path, damaged in silent:
        before = path.read_bytes()
        path.write_bytes(damaged)
        assert loaded(steps) == expected
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda ram: flip(next(ram.glob("hosts/0/2-*/manifest-*")), at=40), "2-"),
        (
            lambda ram: (ram / machine.FILE).write_text("f" * 16),
            f"manifest-{'f' * 16}.0 is missing",
        ),
    ],
)
def test_manifest_that_cannot_be_read_is_told(saved, damage, why):
    damage(saved / "ram")
    (problem,) = problems(saved / "ram", saved / "steps")
    assert problem["kind"] == "manifest"
    assert why in problem["why"]


def verified(*paths):
    locations = [tier_locations.at_path(path, run=tiered_steps.RUN) for path in paths]
    together = tier_locations.Locations(locations)
    return verification.verify(together, together.known, progress=lambda *_: None)


def loaded(steps):
    """The digests of step 2 as stock Orbax loads it."""
    with ocp.training.Checkpointer(steps) as orbax:
        return stock_program.digests(orbax.load_checkpointables(2, {"state": None}))


def rewrite(path, held, parts):
    changed = dataclasses.replace(held, parts=parts)
    write_manifest(path.parent, changed)


def test_step_that_is_not_complete_says_what_is_missing(saved):
    manifest_path = next(in_ram(saved).glob("manifest-*"))
    held = Manifest.parse(manifest_path.read_bytes())
    rewrite(manifest_path, held, Parts.of_rows(held.rows()[1:], held.contents))
    (problem,) = problems(saved / "ram")
    assert problem["kind"] == "incomplete"
    missing = "lacks parts of 1 of 6 arrays and files: [state/params/b[0:6]]"
    assert problem["why"] == missing
    # In another mixture it is complete.
    assert verify(saved / "ram", saved / "steps", code=0)["passed"]


def test_holders_that_disagree_are_named(saved):
    manifest_path = next(in_ram(saved).glob("manifest-*"))
    held = Manifest.parse(manifest_path.read_bytes())
    (leaf, box, digest), *others = held.rows()
    rows = [(leaf, box, digest[::-1]), *others]
    rewrite(manifest_path, held, Parts.of_rows(rows, held.contents))
    found = problems(saved / "ram", saved / "steps")
    by_kind = {each["kind"]: each for each in found}
    assert by_kind.keys() == {"damaged", "diverged"}
    # Each copy is compared with the digest that its own holder lists.
    damaged = [each["tier"] for each in found if each["kind"] == "damaged"]
    assert damaged == ["local"]
    assert by_kind["diverged"]["part"] == "state/params/b[0:6]"
    assert "saved different values" in by_kind["diverged"]["why"]


def test_step_of_plain_orbax_is_not_verifiable(saved):
    steps = saved / "steps"
    with ocp.training.Checkpointer(steps) as orbax:
        assert orbax.save_checkpointables(7, {"state": {"a": 1}})
    printed = verify(steps, code=0)
    assert printed["steps"][-1]["state"] == "unverifiable"
    text = runs.verb("verify", steps)
    assert "Orbax saved no digests" in text
    assert text.endswith("PASSED, except for what cannot be verified\n")
    assert "FAILED" in runs.verb("verify", steps, "--strict", code=1)


def test_peer_is_read_through_its_agent_with_the_secret_from_a_file(saved):
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    path = in_ram(saved) / "state" / "params" / "b" / "c" / "0"
    path.write_bytes(path.read_bytes() + b"more")
    with served.agent_process(saved / "ram") as (_, url):
        agents = run_files.RunAgents(tiered_steps.RUN, {"a": run_files.Seen(url, 0)})
        run_files.write_agents(saved / "steps", agents)
        by_peer = [saved / "steps", "--secret-file", saved / "ram" / "secret"]
        longer, flipped = sorted(problems(*by_peer), key=lambda each: each["part"])
        assert flipped["path"].startswith(f"{url}/hosts/0/2-")
        assert flipped["part"] == "state/params/w[6:8, 0:6]"
        assert longer["why"] == "is 4 bytes longer than the saved copy"
        # By path and through the agent it is one holder.
        assert len(problems(saved / "ram", *by_peer)) == 2
    # It does not answer any more.
    problem, *_ = problems(*by_peer, "--step", 2)
    assert problem["kind"] == "manifest"
    assert url in problem["why"]
