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
from tests.tiers.tiered_steps import steps_of


class Run:
    """A run's RAM disk and the memory of two backup hosts, as they were saved."""

    def __init__(self, directory, stack):
        self.ram = directory / "ram"
        self.roots = [directory / "backup-0", directory / "backup-1"]
        self.saved = directory / "saved"
        with tiered_steps.checkpointer(self.saved) as opened:
            tiered_steps.save(opened, 0)
        known = secret.read_or_create(self.saved)
        shutil.copytree(self.saved, self.ram)
        urls = []
        for root in [self.ram, *self.roots]:
            root.mkdir(exist_ok=True)
            secret.adopt(root, known)
            service = agent.Service(root=str(root))
            urls.append(stack.enter_context(served.serving(service)).url)
        client = peer_client.PeerClient(known, timeout_secs=600)
        stack.callback(client.close)
        (self.url, *self.urls), self.client = urls, client
        self.hosts = [
            stack.enter_context(contextlib.closing(self.backup(root)))
            for root in self.roots
        ]

    def backup(self, root, urls=None):
        return Backup(self, root, urls or self.urls)

    def save(self, step):
        """Has the run hold this step alone, but for those that are held."""
        disk = ram_disk.RamDisk(self.ram, run=tiered_steps.RUN)
        for _, each in disk.all_saves():
            if each.step not in disk.kept():
                shutil.rmtree(disk.step_directory(0, each))
        with tiered_steps.checkpointer(self.saved) as opened:
            tiered_steps.save(opened, step)
        (newest,) = ram_disk.RamDisk(self.saved, run=tiered_steps.RUN).saves(0)
        shutil.copytree(
            self.saved / f"hosts/0/{newest}", self.ram / f"hosts/0/{newest}"
        )

    def held(self, number):
        return steps_of(ram_disk.RamDisk(self.roots[number], run=tiered_steps.RUN))


class Backup:
    """One of the backup hosts."""

    def __init__(self, run, root, urls):
        self._run, self._urls = run, urls
        self._own = backup_host.open_disk(root, run=tiered_steps.RUN)
        self.close = self._own.close

    def follow(self):
        return backup_host.follow(
            self._own,
            agents=[self._run.url],
            backups=self._urls,
            client=self._run.client,
        )


@pytest.fixture
def run(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)


def test_together_they_have_one_copy_and_each_byte_is_sent_once(run):
    taken = [host.follow()[1] for host in run.hosts]
    tiers = [ram_disk.RamDisk(root, run=tiered_steps.RUN) for root in run.roots]
    found = find.search(tiers).newest().found
    assert found.step_id.step == 0
    assert (np.diff(found.table.first_row) == 1).all()
    assert sum(each.copies for each in taken) == len(found.table)
    # The largest part is a quarter of the bytes of both.
    sizes = [each.num_bytes for each in taken]
    assert max(sizes) <= 3 * min(sizes)
    assert all(host.follow() is None for host in run.hosts)


def test_they_copy_the_same_step_which_the_run_keeps_until_all_have_it(run):
    first, second = run.hosts
    assert first.follow()[0].step == 0
    run.save(1)
    # The other one has not copied step 0 yet, and takes it although it is not newest.
    assert first.follow() is None
    assert second.follow()[0].step == 0
    assert second.follow()[0].step == 1
    run.save(2)
    assert first.follow()[0].step == 1
    assert [host.follow()[0].step for host in run.hosts] == [2, 2]
    assert run.held(0) == [1, 2]
    # Where the run has lost a step, the others join those that go on.
    run.save(3)
    assert first.follow()[0].step == 3
    shutil.rmtree(run.ram / preserved._HOLDS)
    run.save(4)
    assert second.follow()[0].step == 4
    assert first.follow()[0].step == 4


def test_one_that_does_not_answer_is_not_waited_for(run):
    first, _ = run.hosts
    assert first.follow()[0].step == 0
    (run.roots[1] / "secret").unlink()
    run.save(1)
    assert first.follow()[0].step == 1


def test_a_part_that_cannot_be_read_leaves_the_step_before(run):
    first, second = run.hosts
    first.follow()
    second.follow()
    run.save(1)
    for file in (run.ram / "hosts/0").glob("1-*/**/*"):
        if file.is_file() and not file.name.startswith("manifest-"):
            file.write_bytes(b"")
    for host in run.hosts:
        with pytest.raises(errors.CheckpointError, match="no good copy"):
            host.follow()
    assert run.held(0) == run.held(1) == [0]


def test_a_share_without_any_part_counts_as_copied(run):
    run.hosts[0].close()
    # Far more shares than there are parts.
    urls = [run.urls[1], run.urls[0], *[run.urls[1]] * 200]
    with contextlib.closing(run.backup(run.roots[0], urls=urls)) as host:
        assert host.follow()[1].copies == 0
    assert run.held(0) == [0]


def test_urls_that_do_not_name_this_host_are_an_error(run):
    run.hosts[0].close()
    with (
        contextlib.closing(run.backup(run.roots[0], urls=run.urls[1:])) as host,
        pytest.raises(errors.RunError, match="none of the backup hosts"),
    ):
        host.follow()
