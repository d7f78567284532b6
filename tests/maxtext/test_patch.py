"""MaxText with our patch asks us by its own entry points, and trains alike."""

import os
import subprocess

import pytest

from elastic_ckpt.training import run_audit
from tests import shared_memory
from tests.maxtext import environment, test_real_maxtext
from tests.maxtext.test_real_maxtext import STEPS, files, hosts, maxtext

__all__ = ["files", "hosts", "maxtext"]
pytestmark = pytest.mark.slow

# Prints which functions of MaxText are others while it is extended.
REPLACED = """
from maxtext.common import extension
from elastic_ckpt.integrations import maxtext, maxtext_seam

maxtext_seam.check_installed()
trainer = maxtext_seam.PRE_TRAIN
ties = {*trainer.ties(), *trainer.replaced}
before = {tie: tie.look_up() for tie in ties}
run = maxtext.Run()
with maxtext_seam.extended(run):
    assert extension.get() is run
    print("replaced:", [t.name for t in ties if t.look_up() is not before[t]])
assert not extension.is_registered()
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory, files):
    environment.set_up()
    directory = environment.patched(tmp_path_factory.mktemp("patched"))
    hosts = environment.Hosts(tmp_path_factory.mktemp("server"), patched=directory)
    made = test_real_maxtext.MaxText(hosts, tmp_path_factory.mktemp("runs"), files)
    made.path = directory
    yield made
    hosts.close()


def test_of_a_maxtext_with_the_patch_no_function_is_replaced(patched):
    ended = subprocess.run(
        [environment.ENVIRONMENT / "bin/python", "-c", REPLACED],
        cwd=environment.ROOT,
        env={
            **os.environ,
            "DECOUPLE_GCLOUD": "TRUE",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{patched.path}{os.pathsep}{environment.ROOT}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "replaced: []\n" in ended.stdout


@pytest.mark.parametrize("in_tiers", [False, True])
def test_through_the_patch_a_run_has_the_same_rows_and_losses(
    maxtext, patched, in_tiers
):
    case, name, begin = "packed_parquet", f"patched-{in_tiers}", 0
    whole = maxtext.uninterrupted(case)
    with shared_memory.directory("maxtext") as ram:
        settings = {"checkpoint_period": 4}
        if in_tiers:
            settings = {
                "enable_multi_tier_checkpointing": True,
                "local_checkpoint_directory": ram,
                "local_checkpoint_period": 2,
                "local_checkpoint_size_limit": "64Mi",
                "multi_tier_checkpointing_backup_interval_steps": 1000,
            }
        for steps, num_hosts in ((10, 2), (STEPS, 1)):
            logs = patched.run(case, name, steps=steps, num_hosts=num_hosts, **settings)
            test_real_maxtext.check_is_part_of(whole, logs, begin=begin, end=steps)
            begin = steps
    run = patched.checkpoints(name).parent
    assert run_audit.RunAudit(str(run)).outcome().passed


@pytest.mark.night
def test_an_error_of_the_data_comes_through_its_loader(patched):
    # Not as the end of the data.
    logs = patched.run(
        "arrayrecord",
        "no_such_column",
        steps=5,
        num_hosts=1,
        codes=[1],
        train_data_columns="body",
    )
    log = (logs / "0.log").read_text()
    assert "Training stopped" not in log
    assert "elastic-ckpt maxtext: " in log
    assert "no feature ['body']" in log
