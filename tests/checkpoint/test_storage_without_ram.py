"""Steps that are due in storage get there where the RAM disk does not take them."""

import errno
import os
import pathlib
import shutil
import stat

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage as files
from elastic_ckpt.tiers.ram import ram_disk
from tests.checkpoint.test_checkpointer import (  # noqa: F401
    Counter,
    RecordedEvents,
    abstract,
    bits,
    make,
    state,
    storage,
)
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
TOO_SMALL = {"limit_bytes": 100}


def save(checkpointer, step, **options):
    parts = {"state": state(step), "data": Counter(10 * step)}
    return checkpointer.save_checkpointables(step, parts, **options)


def check(checkpointer, step):
    """The newest step is `step`, and comes back as it was saved."""
    counter = Counter()
    restored = checkpointer.load_checkpointables(
        None, {"state": abstract(state(0)), "data": counter}
    )
    assert checkpointer.latest.step == step
    assert bits(restored["state"]) == bits(state(step))
    assert counter.count == 10 * step


@pytest.mark.parametrize("is_full", [False, True])
def test_due_steps_are_stored_and_others_are_not(make, tmp_path, monkeypatch, is_full):  # noqa: F811
    recorded = RecordedEvents()
    monkeypatch.setattr(ram_disk.RamDisk, "has_room", lambda *_: not is_full)
    checkpointer = make(storage(tmp_path, every=2), emit=recorded, **TOO_SMALL)
    saved = [save(checkpointer, step) for step in range(1, 6)]
    assert saved == [False, True, False, True, False]
    assert checkpointer.latest.step == 4
    assert checkpointer.is_durable(4)
    check(checkpointer, 4)
    assert [each["step"] for each in recorded.named("backed_up")] == [2, 4]
    assert [each["step"] for each in recorded.named("saved")] == [2, 4]
    reasons = {each["step"]: each["why"] for each in recorded.named("degraded")}
    assert all("limit 100 bytes" in each for each in reasons.values())
    assert [step for step, why in reasons.items() if "without RAM" in why] == [2, 4]
    checkpointer.close()
    check(make(storage(tmp_path, every=2), local="other"), 4)
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert [each.step for each in stock.checkpoints] == [2, 4]
        restored = stock.load_checkpointables(4, {"state": abstract(state(0))})["state"]
        assert bits(restored) == bits(state(4))


def test_the_next_step_is_stored_if_a_due_one_could_not_be(
    make,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    recorded = RecordedEvents()
    checkpointer = make(storage(tmp_path, every=4), emit=recorded, **TOO_SMALL)
    write = files.write_atomic

    def fail(target, content, **options):
        if os.fspath(target).startswith(str(tmp_path / "steps")):
            raise OSError(errno.EROFS, "read-only")
        write(target, content, **options)

    monkeypatch.setattr(files, "write_atomic", fail)
    assert not save(checkpointer, 4)
    monkeypatch.undo()
    assert save(checkpointer, 5)
    assert not save(checkpointer, 6)
    assert [each["step"] for each in recorded.named("backed_up")] == [5]
    checkpointer.close()
    check(make(storage(tmp_path, every=4), local="other"), 5)


class Witness:
    """A component that notes the directory of the host, and who may read it."""

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            (path / "part").write_text("part")
            self.directory = pathlib.Path(os.fspath(path)).parents[1]
            self.mode = stat.S_IMODE(self.directory.stat().st_mode)

        return write()

    async def load(self, directory):
        async def read():
            assert [each.name for each in directory.iterdir()] == ["part"]

        return read()


def test_hosts_of_a_machine_write_elsewhere_in_private_directories_of_their_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ram_disk.RamDisk, "has_room", lambda *_: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    witnesses = []
    # Two slices of one run, and one of another run that has its name.
    for slice_ram in ("slice-0", "slice-1", "slice-0"):
        shutil.rmtree(tmp_path / slice_ram, ignore_errors=True)
        with tiered_steps.checkpointer(tmp_path / slice_ram) as opened:
            witnesses.append(Witness())
            assert opened.save_checkpointables(1, {"data": witnesses[-1]})
            assert opened.load_checkpointables(1, {"data": Witness()})
    assert {witness.directory.parent for witness in witnesses} == {
        tmp_path / "elsewhere"
    }
    assert len({witness.directory for witness in witnesses}) == 3
    assert {witness.mode for witness in witnesses} == {0o700}
    assert not os.listdir(tmp_path / "elsewhere")
