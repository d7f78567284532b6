"""The run directory of a loop on several hosts, of which one writes it."""

import functools
import os

import jax
import pytest

import elastic_ckpt as ec
from elastic_ckpt.training import run_audit
from tests import corpora
from tests.multiprocess import tier_worlds

FILES = "TEXTS_OF_OWN_LOOP"
STEPS = 5


def data(file=None):
    file = file or os.environ[FILES]
    return ec.data.positional(files=(file,), max_target_length=16)


def record(checkpointer, mesh, *, directory, file):
    del checkpointer
    spec = jax.P(mesh.axis_names)
    batches = ec.batches(data(file), mesh=mesh, spec=spec, global_batch_size=8)
    tiers = [ec.Persistent(f"{directory}/none", every=100)]
    with ec.RunDirectory(f"{directory}/run", tiers=tiers, steps=STEPS) as run:
        for step in range(1, STEPS + 1):
            batch = next(batches)
            run.log(step, batch, loss=jax.numpy.mean(batch["targets"]))
    batches.close()


@pytest.mark.slow
def test_the_batches_of_several_hosts_are_those_of_one(tmp_path, monkeypatch):
    texts = [{"text": f"text {n} " * (1 + n % 4)} for n in range(100)]
    file = corpora.write_arrayrecord(tmp_path / "texts.array_record", texts)
    monkeypatch.setenv(FILES, file)
    tier_worlds.run(
        functools.partial(record, directory=str(tmp_path), file=file),
        num_hosts=2,
        directories=[None, None],
        logs=tmp_path / "logs",
        persistent=str(tmp_path / "steps"),
    )
    outcome = run_audit.RunAudit(
        str(tmp_path / "run"), data="tests.multiprocess.test_own_loop:data"
    ).outcome()
    assert outcome.passed
    assert outcome.hosts == (2,)
    assert outcome.num_row_identical_steps == STEPS
    metrics = sorted(path.name for path in (tmp_path / "run" / "metrics").iterdir())
    assert metrics == ["host-00000.jsonl", "host-00001.jsonl"]
