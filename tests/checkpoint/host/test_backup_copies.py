"""Backup hosts together get one copy of each part, and fetch it whole or not at all."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.checkpoint.host import copies, refill
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import part_message, part_table
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.peers import agent, backup_directory, secret
from elastic_ckpt.tiers.ram import ram_disk
from tests.tiers import saved_worlds, served


def placed(offers, num_backups):
    """The parts of each backup host, as holdings; None for one without."""
    hosts = [offer.host for offer in offers]
    backups = [
        refill.backup_host(f"{number:016x}", number=len(hosts) + number)
        for number in range(num_backups)
    ]
    (table,) = part_table.joined([PartTable.from_offer(offer) for offer in offers])
    tables = copies.on_backups(table, hosts, backups)
    group = np.maximum(np.arange(-len(hosts), num_backups), -1)
    of_groups = [each.for_groups(group, num_backups) for each in tables]
    parts = []
    for of_backup in zip(*of_groups, strict=True):
        received = [offer for each in of_backup for offer in each.offers()]
        parts.append(Holdings.from_offers(received) if received else None)
    return parts


def items_of(holdings):
    boxes = [(int(n), holdings.boxes[row]) for row, n in enumerate(holdings.leaf)]
    return [*boxes, *(file.path for file in holdings.files)]


@given(saved_worlds.saved(), st.integers(1, 3))
def test_each_part_is_fetched_by_one_backup_host(offers, num_backups):
    fetched = [
        item
        for part in placed(offers, num_backups)
        if part is not None
        for item in items_of(part)
    ]
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == set(items_of(Holdings.from_offers(offers)))


@contextlib.contextmanager
def peers(tmp_path, steps):
    """A machine with steps, and a backup host; yields what requests have of each."""
    root = tmp_path / "peer"
    for step, files in steps.items():
        served.save(root, step, files)
    with served.serving(agent.Service(root=str(root))) as address:
        backup_directory.make(tmp_path / "backup")
        secret.adopt(tmp_path / "backup", secret.read(secret.path(root)))
        yield {
            step: PartTable.from_offer(
                Offer(tier="local", manifest=served.manifest_of(step, files)),
                url=address.url,
            )
            for step, files in steps.items()
        }


def fetch(root, table, *, saves=()):
    """What a backup host fetches after a request."""
    message = PartMessage(tables=(table,), saves=saves)
    path = root / backup_directory.REQUEST
    storage.write_atomic(path, part_message.to_bytes(message))
    return refill.refill(str(root))


def held(root):
    return ram_disk.RamDisk(root, run=served.RUN).steps()


FILES = {"data/a": b"part a", "data/b": b"part b"}


def test_a_backup_host_fetches_what_is_requested_and_keeps_what_all_have(tmp_path):
    root = tmp_path / "backup"
    with peers(tmp_path, dict.fromkeys((10, 20, 30, 40, 50), FILES)) as tables:
        assert refill.refill(str(root)) is None
        for step in (10, 20, 30):
            fetched, taken = fetch(root, tables[step])
            assert (fetched.step, taken.copies) == (step, 2)
        # Another backup host has not fetched 30, and so not 20 with certainty.
        assert held(root) == [20, 30]
        _, taken = fetch(root, tables[40], saves=((20, "0"),))
        assert taken.num_bytes == 12
        assert held(root) == [20, 30, 40]
        # A part that cannot be fetched leaves the step before.
        file = tmp_path / "peer/hosts/0/50-0/data/b"
        file.write_bytes(b"part c")
        with pytest.raises(errors.CheckpointError, match="no good copy"):
            fetch(root, tables[50])
    assert held(root) == [40]
    directory = ram_disk.RamDisk(root, run=served.RUN).step_directory(
        0, StepId(40, "0")
    )
    assert (directory / "data/a").read_bytes() == FILES["data/a"]
