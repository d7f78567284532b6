"""`elastic-ckpt verify`: any damage of any copy is found, and named."""

import io
import json
import pathlib
import random
import shutil
import sys

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.cli import main
from elastic_ckpt.inspect import tier_locations, verification
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.tiers.persistent import orbax_digests
from elastic_ckpt.tiers.ram import machine
from tests import runs
from tests.checkpoint import stock_program
from tests.tiers import served, tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


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


def verify(*paths, code=1):
    return json.loads(runs.verb("verify", *paths, "--json", code=code))


def problems(*paths):
    return verify(*paths)["problems"]


def test_all_is_well_in_any_mixture(saved):
    together = runs.verb("verify", saved / "ram", saved / "steps")
    assert together.splitlines()[-1] == "PASSED: every copy is what was saved"
    for path in (saved / "ram", saved / "steps", saved / "steps" / "1"):
        assert verify(path, code=0)["passed"]
    one = verify(saved / "steps" / "1", code=0)
    assert [step["step"] for step in one["steps"]] == [1]
    assert runs.verb("verify", saved / "steps", "--step", 1).startswith("step 1:")


def test_a_bit_in_ram_is_named_with_its_leaf_box_host_and_path(saved):
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


def test_a_wrong_checksum_behind_right_values_is_told(saved):
    path = in_ram(saved) / "state" / "params" / "b" / "c" / "0"
    flip(path, at=-1)
    (problem,) = problems(saved / "ram")
    assert problem["part"] == "state/params/b[0:6]"
    assert problem["why"].startswith("has right values, and a wrong CRC-32C")


def test_the_file_of_a_component_is_named(saved):
    for path in (in_ram(saved) / "data" / "a.json", saved / "steps/2/data/b.json"):
        flip(path)
    reported = problems(saved / "ram", saved / "steps")
    assert [(each["part"], each["tier"]) for each in reported] == [
        ("data/a.json", "local"),
        ("data/b.json", "persistent"),
    ]


def bits(directory, count):
    """Random bits of all files, of each file one at least."""
    generator = random.Random(7)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    files = [path for path in files if path.stat().st_size]
    files += generator.choices(files, k=max(0, count - len(files)))
    for path in files:
        yield path, generator.randrange(path.stat().st_size), generator.randrange(8)


def verified(*paths):
    locations = [tier_locations.at_path(path, run=tiered_steps.RUN) for path in paths]
    together = tier_locations.Locations(locations)
    return verification.verify(together, together.steps, progress=lambda *_: None)


def silent_flips(directory, *paths):
    """Flips bits of all files; of those that are passed over, the files and places."""
    silent = []
    for path, at, bit in bits(directory, 60):
        before = path.read_bytes()
        flip(path, at=at, bit=bit)
        if verified(*paths).passed(strict=True):
            silent.append((path, at, bit))
        path.write_bytes(before)
    assert verified(*paths).passed(strict=True)
    return silent


def test_a_flipped_bit_in_any_file_of_a_host_is_noticed(saved):
    silent = silent_flips(saved / "ram" / "hosts" / "0", saved / "ram")
    # Nobody takes values by these.
    assert {path.name for path, *_ in silent} <= {"zarr.json", "lock"}


@pytest.mark.slow
def test_a_flipped_bit_in_storage_is_noticed_or_nothing_to_orbax(saved):
    steps = saved / "steps"
    expected = loaded(steps)
    silent = silent_flips(steps / "2", steps)
    # Stores keep what they have replaced, and that is in a file proves nothing.
    names = {path.name for path, *_ in silent if path.parent.name != "d"}
    assert names <= {"commit_success.txt"}
    for path, at, bit in silent:
        before = path.read_bytes()
        flip(path, at=at, bit=bit)
        assert loaded(steps) == expected
        path.write_bytes(before)


def loaded(steps):
    """The digests of step 2 as stock Orbax loads it."""
    with ocp.training.Checkpointer(steps) as orbax:
        return stock_program.digests(orbax.load_checkpointables(2, {"state": None}))


def silent_appends(directory, *paths):
    """Appends a byte to each file; those that are passed over."""
    silent = []
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        before = path.read_bytes()
        path.write_bytes(before + b"}")
        if verified(*paths).passed(strict=True):
            silent.append(path)
        path.write_bytes(before)
    assert verified(*paths).passed(strict=True)
    return silent


def test_a_byte_behind_any_file_of_a_host_is_noticed(saved):
    silent = silent_appends(saved / "ram" / "hosts" / "0", saved / "ram")
    # As for bits.
    assert {path.name for path in silent} == {"zarr.json", "lock"}


def test_a_byte_behind_a_file_in_storage_is_noticed_or_nothing_to_orbax(saved):
    steps = saved / "steps"
    expected = loaded(steps)
    silent = silent_appends(steps / "2", steps)
    # The index of a store has the offset and the length of values in data files.
    names = {path.name for path in silent if path.parent.name != "d"}
    assert names == {"commit_success.txt"}
    for path in silent:
        path.write_bytes(path.read_bytes() + b"}")
    assert loaded(steps) == expected


def test_a_file_that_is_too_long_is_reported_with_a_remedy(saved):
    for path in (in_ram(saved) / "data" / "a.json", saved / "steps/2/data/a.json"):
        before = path.read_bytes()
        path.write_bytes(before + b"more")
        (problem,) = problems(saved / "ram", saved / "steps")
        assert (problem["kind"], problem["part"]) == ("damaged", "data/a.json")
        assert problem["path"] == str(path)
        assert problem["why"] == "is longer than what was saved, by 4 bytes"
        assert (
            problem["remedy"]
            == "a restore reads only its first 3 bytes: cut it to them"
        )
        path.write_bytes(before)


@pytest.mark.parametrize("tier", ["ram", "steps"])
def test_a_restore_hands_out_no_bytes_behind_a_file_of_a_component(saved, tier):
    directory = in_ram(saved) if tier == "ram" else saved / "steps" / "2"
    for path in (directory / "data").glob("*.json"):
        path.write_bytes(path.read_bytes() + b"more")
    ram = saved / "ram" if tier == "ram" else saved / "another"
    data = Texts()
    with tiered_steps.checkpointer(ram, saved / "steps") as opened:
        opened.load_checkpointables(2, {"data": data})
    texts = {name: data.texts[name] for name in ("a.json", "b.json")}
    assert texts == {"a.json": '"a"', "b.json": '"b"'}


class Texts(tiered_steps.Cursors):
    """The component of `tiered_steps`, of which the files are read too."""

    async def load(self, directory):
        async def read():
            self.texts = {path.name: path.read_text() for path in directory.iterdir()}

        return read()


def test_metadata_that_orbax_cannot_read_is_told(saved):
    step = saved / "steps" / "1"
    for file in ("_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding"):
        before = (step / file).read_bytes()
        (step / file).write_bytes(before[:-1])
        (problem,) = problems(step)
        assert (problem["kind"], problem["part"]) == ("orbax", file)
        assert problem["why"] == "is not what was saved: its digest differs"
        (step / file).unlink()
        (problem,) = problems(step)
        assert (problem["part"], problem["why"]) == (file, "is missing")
        (step / file).write_bytes(before)


def test_an_array_that_orbax_would_not_load_is_told(saved):
    # As if it had been committed so.
    step = saved / "steps" / "1"
    names = ["_CHECKPOINT_METADATA", "state/_METADATA"]
    tree = step / "state" / "_METADATA"
    tree.write_text(tree.read_text().replace('"key": "w"', '"key": "v"'))
    files = {name: (step / name).read_bytes() for name in names}
    (step / orbax_digests.FILE).write_bytes(orbax_digests.to_bytes(files))
    assert sorted(each["why"] for each in problems(step)) == [
        "does not list the array 'params.w', so Orbax does not load it",
        "lists the array 'params.v', which is not in the store",
    ]


def test_values_that_only_our_manifests_find_are_told(saved):
    step = saved / "steps" / "2" / "state"
    other = saved / "steps" / "1" / "state"
    for name in ("manifest.ocdbt", "d"):
        path = step / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(other / "manifest.ocdbt", step)
    shutil.copytree(other / "d", step / "d")
    reported = problems(saved / "steps", saved / "ram")
    assert {each["kind"] for each in reported} == {"orbax"}
    assert "state/params/w[6:8, 0:6]" in {each["part"] for each in reported}


def test_a_step_that_is_not_complete_says_what_is_missing(saved):
    manifest_path = next(in_ram(saved).glob("manifest-*"))
    held = manifest_file.parse(manifest_path.read_bytes())
    part = held.fragments.row(0, contents=held.contents)
    fewer = held.fragments.from_rows(
        [
            held.fragments.row(number, contents=held.contents)
            for number in range(1, len(held.fragments))
        ],
        contents=held.contents,
    )
    manifest_path.unlink()
    manifest_file.write(
        manifest_path.parent,
        type(held)(**{**vars(held), "fragments": fewer}),
    )
    assert part.file.startswith("state/params/b")
    (problem,) = problems(saved / "ram")
    assert problem["kind"] == "incomplete"
    assert problem["why"] == "lacks parts of 1 of 4 leaves: [state/params/b[0:6]]"
    # In another mixture it is complete.
    assert verify(saved / "ram", saved / "steps", code=0)["passed"]


def test_holders_that_disagree_are_named(saved):
    manifest_path = next(in_ram(saved).glob("manifest-*"))
    held = manifest_file.parse(manifest_path.read_bytes())
    digests = held.fragments.digest.copy()
    digests[0] ^= 1
    fragments = type(held.fragments)(**{**vars(held.fragments), "digest": digests})
    manifest_file.write(
        manifest_path.parent, type(held)(**{**vars(held), "fragments": fragments})
    )
    by_kind = {each["kind"]: each for each in problems(saved / "ram", saved / "steps")}
    assert by_kind.keys() == {"damaged", "diverged"}
    assert by_kind["diverged"]["part"] == "state/params/b[0:6]"
    assert "saved different values" in by_kind["diverged"]["why"]


def test_a_manifest_that_cannot_be_read_is_told(saved):
    flip(next(in_ram(saved).glob("manifest-*")), at=40)
    reported = problems(saved / "ram", saved / "steps")
    assert [each["kind"] for each in reported] == ["manifest"]
    assert str(in_ram(saved)) in reported[0]["why"]


def test_a_machine_that_has_lost_its_id_is_told(saved):
    (saved / "ram" / machine.FILE).write_text("f" * 16)
    (problem,) = problems(saved / "ram", saved / "steps")
    assert "is not of the machine that" in problem["why"]


def test_a_step_of_plain_orbax_is_not_verifiable(saved):
    steps = saved / "steps"
    with ocp.training.Checkpointer(steps) as orbax:
        assert orbax.save_checkpointables(7, {"state": {"a": 1}})
    printed = verify(steps, code=0)
    assert printed["steps"][-1]["state"] == "unverifiable"
    text = runs.verb("verify", steps)
    assert "Orbax saved it without digests" in text
    assert text.endswith("PASSED, but for what cannot be verified\n")
    assert "FAILED" in runs.verb("verify", steps, "--strict", code=1)


def test_the_directory_of_a_run_stands_for_its_checkpoints(saved):
    run = saved / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (saved / "steps").rename(run / "checkpoints")
    assert verify(run, saved / "ram", code=0)["passed"]


def test_a_peer_is_read_through_its_agent_with_the_secret_from_a_file(saved):
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    with served.agent_process(saved / "ram") as (_, url):
        secret = saved / "ram" / "secret"
        by_peer = ["--peer", url, "--secret-file", secret, "--run", tiered_steps.RUN]
        (problem,) = problems(*by_peer)
        assert problem["path"].startswith(f"{url}/v1/hosts/0/2-")
        assert problem["part"] == "state/params/w[6:8, 0:6]"
        path = in_ram(saved) / "state" / "params" / "b" / "c" / "0"
        path.write_bytes(path.read_bytes() + b"more")
        _, longer = problems(*by_peer)
        assert longer["why"] == "is longer than what was saved, by 4 bytes"
        path.write_bytes(path.read_bytes()[:-4])
        # By path and through the agent it is one holder.
        (problem,) = problems(saved / "ram", "--peer", url)
        assert not problem["path"].startswith("http")
        output = runs.verb("verify", "--peer", url, "--run", "r", code=1)
        assert "--peer needs the run's secret: add --secret-file" in output
        output = runs.verb("verify", *by_peer[:4], code=1)
        assert "add --run" in output


def test_a_second_directory_with_the_same_step_is_read_too(saved):
    shutil.copytree(saved / "steps", saved / "copy")
    flip(saved / "copy" / "2" / "data" / "a.json")
    flip(saved / "copy" / "2" / "state" / "_sharding")
    reported = problems(saved / "steps", saved / "copy")
    assert {each["path"] for each in reported} == {
        str(saved / "copy" / "2" / "data" / "a.json"),
        str(saved / "copy" / "2" / "state" / "_sharding"),
    }


def test_a_peer_that_does_not_answer_is_told(saved):
    with served.agent_process(saved / "ram") as (_, url):
        pass
    gone = ["--peer", url, "--run", tiered_steps.RUN]
    (problem,) = problems(saved / "steps", "--step", 2, *gone, *secret_of(saved))
    assert problem["kind"] == "manifest"
    assert url in problem["why"]
    output = runs.verb("verify", *gone, *secret_of(saved), code=1)
    assert "they contain the steps []; the list of steps " in output
    assert f"cannot be read: {url} fails" in output


def test_a_malformed_url_of_a_peer_is_refused(saved):
    for verb in ("verify", "inspect"):
        output = runs.verb(verb, saved / "ram", "--peer", "10.0.0.7:8470", code=1)
        assert "--peer has '10.0.0.7:8470', which is not the URL of an agent" in output


def secret_of(saved):
    return ["--secret-file", saved / "ram" / "secret"]


def test_what_is_not_there_is_said(saved):
    assert "give a PATH" in runs.verb("verify", code=1)
    output = runs.verb("verify", saved / "none", code=1)
    assert "none: there is no such directory" in output
    output = runs.verb("verify", saved / "steps", "--step", 5, code=1)
    assert (
        "there is no step 5 in the given places; they contain the steps [1, 2]"
        in output
    )
    (saved / "empty").mkdir()
    output = runs.verb("verify", saved / "empty", code=1)
    assert "they contain the steps []" in output


def test_the_json_is_stable(saved, golden):
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    (saved / "steps" / "1" / "state" / "_sharding").write_text("[")
    output = runs.verb("verify", saved / "ram", saved / "steps", "--json", code=1)
    machine_id = (saved / "ram" / machine.FILE).read_text()
    save = in_ram(saved).name.partition("-")[2]
    for text, name in ((str(saved), "/saved"), (machine_id, "M"), (save, "S")):
        output = output.replace(text, name)
    golden("verify_v1.json", output)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_says_how_far_it_is_on_a_terminal_alone(saved, monkeypatch):
    assert "GiB" not in runs.verb("verify", saved / "ram")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main.main(["verify", str(saved / "ram")]) == 0
    assert "\rread" not in sys.stderr.getvalue()
    assert "\x1b[Kread 0.00 of 0.00 GiB" in sys.stderr.getvalue()


def test_nothing_is_written(saved):
    def tree():
        return {
            str(path): path.read_bytes() if path.is_file() else None
            for path in pathlib.Path(saved).rglob("*")
        }

    before = tree()
    verify(saved / "ram", saved / "steps", code=0)
    runs.verb("inspect", saved / "ram", saved / "steps")
    assert tree() == before
