"""Backup hosts of a run, each in a RAM disk of its own with its agent."""

import contextlib
import shutil

import numpy as np
import pytest

from elastic_ckpt.checkpoint import backup_host
from elastic_ckpt.core import errors
from elastic_ckpt.tiers import find, preserved
from elastic_ckpt.tiers.peers import agent, peer_client, secret
from elastic_ckpt.tiers.ram import ram_disk
from tests.tiers import served, tiered_steps


class Run:
    """A run that has saved step 0 in RAM, and the memory of two backup hosts."""

    def __init__(self, directory, stack):
        self.ram = directory / "ram"
        self.roots = [directory / "backup-0", directory / "backup-1"]
        self.checkpointer = stack.enter_context(tiered_steps.checkpointer(self.ram))
        self.save(0)
        known = secret.read_or_create(self.ram)
        urls = []
        for root in [self.ram, *self.roots]:
            root.mkdir(exist_ok=True)
            secret.adopt(root, known)
            service = agent.Service(root=str(root))
            urls.append(stack.enter_context(served.serving(service)).url)
        self.url, *self.urls = urls
        self.client = peer_client.PeerClient(known, timeout_secs=600)
        stack.callback(self.client.close)
        opened = [backup_host.open_disk(r, run=tiered_steps.RUN) for r in self.roots]
        self.disks = [stack.enter_context(contextlib.closing(each)) for each in opened]

    def save(self, step):
        tiered_steps.save(self.checkpointer, step)

    def follow(self, number, urls=None):
        """A backup host copies its share; the step and what it took, or None."""
        urls = {"agents": [self.url], "backups": urls or self.urls}
        taken = backup_host.follow(self.disks[number], client=self.client, **urls)
        return taken and (taken[0].step, taken[1])

    def held(self, number):
        disk = ram_disk.RamDisk(self.roots[number], run=tiered_steps.RUN)
        return tiered_steps.steps_of(disk)


@pytest.fixture
def run(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)


def test_together_they_have_one_copy_and_each_byte_is_sent_once(run):
    taken = [run.follow(number)[1] for number in (0, 1)]
    tiers = [ram_disk.RamDisk(root, run=tiered_steps.RUN) for root in run.roots]
    found = find.search(tiers).newest().found
    assert found.step_id.step == 0
    assert (np.diff(found.table.first_row) == 1).all()
    assert sum(each.copies for each in taken) == len(found.table)
    # The largest part is a quarter of the bytes of both.
    sizes = [each.num_bytes for each in taken]
    assert max(sizes) <= 3 * min(sizes)
    assert run.follow(0) is run.follow(1) is None


def test_they_copy_the_same_step_which_the_run_keeps_until_all_have_it(run):
    assert run.follow(0)[0] == 0
    run.save(1)
    # The other one has not copied step 0 yet, and takes it although it is not newest.
    assert run.follow(0) is None
    assert [run.follow(1)[0], run.follow(1)[0]] == [0, 1]
    run.save(2)
    assert [run.follow(0)[0], run.follow(0)[0], run.follow(1)[0]] == [1, 2, 2]
    assert run.held(0) == [1, 2]
    # Where the run has lost a step, the others join those that go on.
    run.save(3)
    assert run.follow(0)[0] == 3
    shutil.rmtree(run.ram / preserved._HOLDS)
    run.save(4)
    assert [run.follow(1)[0], run.follow(0)[0]] == [4, 4]


def test_a_host_that_does_not_answer_or_a_part_that_cannot_be_read_delays_no_other(run):
    assert [run.follow(0)[0], run.follow(1)[0]] == [0, 0]
    (run.roots[1] / "secret").unlink()
    run.save(1)
    assert run.follow(0)[0] == 1
    run.save(2)
    for file in (run.ram / "hosts/0").glob("2-*/**/*"):
        if file.is_file() and not file.name.startswith("manifest-"):
            file.write_bytes(b"")
    with pytest.raises(errors.CheckpointError, match="no good copy"):
        run.follow(0)
    assert run.held(0) == [1]


def test_a_share_without_any_part_counts_as_copied_and_no_share_is_an_error(run):
    with pytest.raises(errors.RunError, match="none of the backup hosts"):
        run.follow(0, run.urls[1:])
    # Far more shares than there are parts.
    urls = [run.urls[1], run.urls[0], *[run.urls[1]] * 200]
    assert run.follow(0, urls)[1].copies == 0
    assert run.held(0) == [0]
