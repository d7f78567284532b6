"""Bad copies on machines without a host of the world are put right by a restore."""

import pathlib

import pytest

from tests.multiprocess import machines
from tests.multiprocess.test_elastic_ram import on, restored, saved

HOSTS = 4


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


def state_files(ram, number):
    """The files of the state in the RAM of a machine, with their content."""
    slots = pathlib.Path(ram.directory(number)).glob("hosts/*/4-*")
    return {
        path: path.read_bytes()
        for slot in slots
        for path in slot.rglob("*")
        if path.is_file() and path.parts[-2] != "leases" and path.suffix != ".json"
    }


@pytest.mark.slow
def test_a_restore_puts_right_what_it_has_read_from_idle_machines(ram, tmp_path):
    on(ram, range(HOSTS), saved([4], sharded=True), tmp_path, copies=1, slices=2)
    idle = [1, 2, 3]
    before = {number: state_files(ram, number) for number in idle}
    # Each part has another holder, in the other slice or in this one.
    for path, content in before[1].items():
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    ram.start_agents(idle)
    events = on(ram, [0], restored(4, sharded=True), tmp_path, copies=1)
    (event,) = (each for each in events if each["event"] == "restored_from")
    assert event["bad_copies"] > 0
    assert event["repaired"] == event["bad_copies"]
    good = [path for path, each in before[1].items() if path.read_bytes() == each]
    assert len(good) == event["repaired"]
    assert [state_files(ram, number) for number in (2, 3)] == [before[2], before[3]]
    ram.lose(0)
    on(ram, [1, 2, 3], restored(4, sharded=True), tmp_path, copies=1)
