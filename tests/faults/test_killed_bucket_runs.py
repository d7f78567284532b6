"""Runs in buckets, killed with SIGKILL at random moments: no committed step is lost.

`ELASTIC_CKPT_KILLS=20` kills each of them more often, and `-s` prints what was left.
"""

import os
import random
import re
import signal
import time

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from tests import runs

KILLS = int(os.environ.get("ELASTIC_CKPT_KILLS", "6"))
# One that is uploaded, and one that is removed, as of two one is kept.
MOST_LEFTOVERS = 2
# From the first step on, so that most kills hit uploads, commits and removals.
MOST_SECS = 1.5


class KilledRun:
    """A run in a bucket that is started and killed again and again.

    Args:
      url: of the directory of runs.
      directory: of its configuration and output, on this machine.
      corpus: that it trains on.
    """

    def __init__(self, url, directory, corpus):
        self._config = runs.write_config(
            directory,
            corpus,
            base_output_directory=url,
            checkpoint_period=2,
            max_num_checkpoints_to_keep=2,
            steps=1_000_000,
        )
        self.path = f"{url}/tiny"
        self._output = directory / "output"
        self.root = persistent_root.PersistentRoot.from_path(f"{self.path}/checkpoints")
        # The newest step that was committed before the last kill.
        self.newest = 0

    def start_and_kill(self, secs):
        """Kills it so many seconds after it trains; returns the steps that are left."""
        self._output.unlink(missing_ok=True)
        process = runs.Started(
            "train", self._config, output=self._output, leads_group=True
        )
        began = time.monotonic()
        while (begun := self._begun()) is None:
            assert process.poll() is None, self._output.read_text()
            assert time.monotonic() < began + runs.LIMIT_SECS
            time.sleep(0.02)
        time.sleep(secs)
        committed = self.root.steps()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert begun >= self.newest, self._output.read_text()
        steps = self.root.steps()
        assert max(steps, default=0) >= max(committed, default=0)
        self.newest = max(steps, default=0)
        return steps

    def finish(self):
        """Trains a few steps more, to the end."""
        ended = runs.cli("train", self._config, f"steps={self.newest + 4}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"from step {self.newest} to" in ended.stdout

    def incomplete(self):
        """The steps that are committed and not whole."""
        run = persistent_root.find_run(self.root.path)
        tier = persistent_tier.PersistentTier(self.root, run=run)
        return [each.step for each in tier.held() if not each.complete]

    def _begun(self):
        # The step that this start goes on from; None before it trains.
        if not self._output.exists():
            return None
        match = re.search(r"tiny: (?:from step (\d+) )?to", self._output.read_text())
        return match and int(match[1] or 0)


def num_bytes(directory):
    return sum(
        num_bytes(each) if each.is_dir() else each.stat().length
        for each in directory.iterdir()
    )


@pytest.mark.slow(minutes=1)
def test_a_run_that_is_killed_at_random_loses_no_committed_step(
    bucket, tmp_path, corpus
):
    killed = KilledRun(bucket, tmp_path, corpus)
    moments = random.Random(7)
    num_leftovers, num_committed, num_in_vain = [], 0, 0
    for _ in range(KILLS):
        before = killed.newest
        steps = killed.start_and_kill(moments.uniform(0, MOST_SECS))
        num_committed += (killed.newest - before) // 2
        num_in_vain = 0 if killed.newest > before else num_in_vain + 1
        leftovers = killed.root.leftovers()
        num_leftovers.append(len(leftovers))
        assert len(leftovers) <= MOST_LEFTOVERS, leftovers
        if steps:
            assert not killed.incomplete()
            most_bytes = max(num_bytes(killed.root.final(step)) for step in steps)
            most_bytes *= 1 + num_in_vain
            assert all(num_bytes(each.path) <= most_bytes for each in leftovers)
    killed.finish()
    print(f"{KILLS} kills, {num_committed} steps committed, left: {num_leftovers}")
    assert "PASSED" in runs.verb("verify", killed.path)
    assert "PASSED" in runs.verb("audit", killed.path)
    assert len(killed.root.leftovers()) <= MOST_LEFTOVERS
    storage.remove(killed.path)
