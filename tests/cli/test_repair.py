"""`elastic-ckpt verify --repair`: bad copies become good, nothing else changes."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from tests import ocdbt_extents, runs
from tests.checkpoint import stock_program
from tests.tiers import served, tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A RAM disk, and two steps in storage, of which the second is in RAM too."""
    directory = tmp_path_factory.mktemp("kept")
    save(directory / "ram", directory / "steps")
    return directory


def save(ram, steps):
    with tiered_steps.checkpointer(ram, steps) as checkpointer:
        for step in (1, 2):
            parts = {"state": state(step), "data": tiered_steps.Cursors()}
            assert checkpointer.save_checkpointables(step, parts)
            checkpointer.wait()


def state(step):
    """As in `tiered_steps`, with chunks that are too large to lie in an index."""
    small = tiered_steps.state(step)
    wide = jax.jit(lambda w: jnp.tile(w, (1, 32)))(small["params"]["w"])
    bias = jnp.tile(small["params"]["b"], 32)
    return {**small, "params": {"w": wide, "b": bias}}


@pytest.fixture
def saved(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def steps(saved):
    return saved / "steps"


def in_ram(saved):
    """The directory of step 2 in RAM."""
    (directory,) = (saved / "ram" / "hosts" / "0").glob("2-*")
    return directory


def host_store(steps):
    """The store of the host that saved step 2."""
    stores = (steps / "2" / "state").iterdir()
    (store,) = (each for each in stores if each.name.startswith("ocdbt.process_"))
    return store


def flip(path, *, at=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def spoil_values(steps, *keys):
    """Flips a bit of some chunks of step 2 in storage."""
    store = host_store(steps)
    extents = ocdbt_extents.read(store)
    for key in keys:
        file, offset, _ = extents[key]
        flip(store / file, at=offset)


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def verified(*arguments, code):
    return json.loads(runs.verb("verify", *arguments, "--json", code=code))


def repaired(*arguments, code=0):
    return verified(*arguments, "--repair", code=code)["repairs"]


def loaded(steps):
    """The digests of step 2 as stock Orbax loads it."""
    with ocp.training.Checkpointer(steps) as orbax:
        return stock_program.digests(orbax.load_checkpointables(2, {"state": None}))


def test_without_repair_nothing_is_written_and_the_remedy_is_named(saved, steps):
    spoil_values(steps, "params.w/c/3/0")
    before = contents(saved)
    report = verified(saved / "ram", steps, code=1)
    assert "repairs" not in report
    assert "verify --repair" in report["problems"][0]["remedy"]
    assert contents(saved) == before


def test_chunks_in_storage_are_put_right_from_ram_for_orbax_too(saved, steps):
    expected = loaded(steps)
    spoil_values(steps, "params.w/c/3/0", "params.w/c/5/0", "params.b/c/0")
    untouched = contents(steps / "1"), contents(saved / "ram")
    repairs = repaired(saved / "ram", steps)
    assert [each["problem"] for each in repairs] == [None] * 3
    assert {each["part"] for each in repairs} == {
        "state/params/w[6:8, 0:192]",
        "state/params/w[10:12, 0:192]",
        "state/params/b[0:192]",
    }
    assert (contents(steps / "1"), contents(saved / "ram")) == untouched
    shutil.rmtree(saved / "ram")
    assert verified(steps, code=0)["passed"]
    assert loaded(steps) == expected
    assert not list((steps / "leases").iterdir())


def test_nothing_is_written_where_all_is_well(saved, steps):
    before = contents(saved)
    assert repaired(saved / "ram", steps) == []
    assert contents(saved) == before


def test_a_file_of_a_component_is_put_right(saved, steps):
    before = contents(steps)
    flip(steps / "2" / "data" / "b.json")
    (steps / "2" / "data" / "a.json").write_bytes(b'"a" and more')
    repairs = repaired(saved / "ram", steps)
    assert {each["part"] for each in repairs} == {"data/a.json", "data/b.json"}
    assert contents(steps) == before


def test_data_files_that_are_gone_are_made_anew(saved, steps):
    expected = loaded(steps)
    for path in (host_store(steps) / "d").iterdir():
        path.unlink()
    repairs = repaired(saved / "ram", steps)
    assert repairs
    assert all(each["problem"] is None for each in repairs)
    shutil.rmtree(saved / "ram")
    assert verified(steps, code=0)["passed"]
    assert loaded(steps) == expected


@pytest.mark.parametrize("of_host", [False, True])
def test_an_index_that_cannot_be_read_is_made_anew(saved, steps, of_host):
    expected = loaded(steps)
    store = host_store(steps) if of_host else steps / "2" / "state"
    flip(store / "manifest.ocdbt", at=20)
    locations = [saved / "ram", steps] if of_host else [steps]
    assert verified(*locations, code=1)["problems"]
    repairs = repaired(*locations)
    assert [each["problem"] for each in repairs] == [None] * len(repairs)
    assert verified(steps, code=0)["passed"]
    assert loaded(steps) == expected


def test_what_has_no_good_copy_is_named_and_left(saved, steps):
    spoil_values(steps, "params.w/c/3/0", "params.b/c/0")
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    report = verified(saved / "ram", steps, "--repair", code=1)
    by_part = {(each["part"], each["tier"]): each for each in report["repairs"]}
    assert by_part["state/params/b[0:192]", "persistent"]["problem"] is None
    for tier in ("local", "persistent"):
        lost = by_part["state/params/w[6:8, 0:192]", tier]
        assert lost["problem"] == "no good copy is left"
    assert {each["part"] for each in report["problems"]} == {
        "state/params/w[6:8, 0:192]"
    }
    text = runs.verb("verify", saved / "ram", steps, "--repair", code=1)
    assert "was not put right: no good copy is left" in text
    assert text.splitlines()[-1] == "FAILED"


def test_ram_is_put_right_from_storage(saved, steps):
    before = contents(saved / "ram")
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    (in_ram(saved) / "state" / "params" / "b" / "c" / "0").unlink()
    flip(in_ram(saved) / "data" / "a.json")
    repairs = repaired(saved / "ram", steps)
    assert [each["problem"] for each in repairs] == [None] * 3
    after = contents(saved / "ram")
    # It has the process that wrote the slot last.
    lock = pathlib.Path("hosts/0/lock")
    assert after | {lock: b""} == before | {lock: b""}


def test_the_slot_of_a_live_process_is_left_to_it(saved, steps):
    flip(in_ram(saved) / "data" / "a.json")
    with storage.exclusive_lock(saved / "ram" / "hosts" / "0" / "lock"):
        (repair,) = repaired(saved / "ram", steps, code=1)
    assert "a live process has the slot" in repair["problem"]


def test_a_machine_is_put_right_through_its_agent(saved, steps):
    flip(in_ram(saved) / "state" / "params" / "w" / "c" / "3" / "0")
    with served.agent_process(saved / "ram") as (_, url):
        secret = ["--secret-file", saved / "ram" / "secret"]
        (repair,) = repaired(steps, "--peer", url, *secret)
    assert repair["path"].startswith(f"{url}/v1/hosts/0/2-")
    assert verified(saved / "ram", code=0)["passed"]


def test_storage_is_put_right_from_a_peer(saved, steps):
    spoil_values(steps, "params.w/c/3/0")
    with served.agent_process(saved / "ram") as (_, url):
        secret = ["--secret-file", saved / "ram" / "secret"]
        (repair,) = repaired(steps, "--peer", url, *secret)
    assert (repair["tier"], repair["problem"]) == ("persistent", None)
    assert verified(steps, code=0)["passed"]


@pytest.mark.slow
# The clients are those of the other tests, and slower for S3.
@pytest.mark.parametrize(
    "bucket",
    ["gs", pytest.param("s3", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_step_in_a_bucket_is_put_right_from_ram(bucket, tmp_path):
    save(tmp_path / "ram", bucket)
    steps = storage.absolute(bucket)
    for file in (host_store(steps) / "d").iterdir():
        flip(file)
    flip(steps / "2" / "data" / "a.json")
    assert verified(bucket, code=1)["problems"]
    repairs = repaired(tmp_path / "ram", bucket)
    assert [each["problem"] for each in repairs] == [None] * len(repairs)
    assert {each["part"] for each in repairs} > {"data/a.json"}
    assert verified(bucket, code=0)["passed"]
    assert not (steps / "leases").exists()
