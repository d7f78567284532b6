"""Messages between hosts: exchanges of one host do not disturb each other."""

import pytest

from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.peers import mailbox
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.source import ReadError


@pytest.fixture
def make_box(tmp_path):
    disk = ram_disk.RamDisk(tmp_path, run="run")
    host = manifest.Host(id=disk.host_id(0), number=0, domains={})

    def make():
        return mailbox.Mailbox(disk, slot=0, hosts=[host], endpoint=None)

    return make


def test_exchanges_of_one_host_do_not_disturb_each_other(make_box, tmp_path):
    posting, removing = make_box(), make_box()
    posting.post("copies-offered", b"1")
    removing.remove("backup-")
    assert posting.read(0, "copies-offered") == b"1"
    posting.remove("copies-")
    with pytest.raises(ReadError, match="is missing"):
        posting.read(0, "copies-offered")
    # The directory stays: another exchange may be about to post there.
    directory = tmp_path / "hosts" / "0" / mailbox.MESSAGES
    assert list(directory.iterdir()) == []


def test_a_delivered_message_is_read_once_and_removed_with_its_exchange(make_box):
    box = make_box()
    box.deliver(0, "copies-offered", b"another way")
    assert box.read(0, "copies-offered") == b"another way"
    with pytest.raises(ReadError):
        box.read(0, "copies-offered")
    box.deliver(0, "copies-offered", b"late")
    box.remove("copies-")
    with pytest.raises(ReadError):
        box.read(0, "copies-offered")
