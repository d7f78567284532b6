"""MaxText's training on preferences, by Tunix's trainer, on one host and on others."""

import shutil

import pyarrow as pa
import pytest

from elastic_ckpt.inspect import status
from elastic_ckpt.training import run_audit
from tests import corpora, runs, shared_memory
from tests.maxtext import environment, test_real_maxtext
from tests.maxtext.test_patch import patched
from tests.maxtext.test_real_maxtext import EVAL_INTERVAL, STEPS, files, hosts

__all__ = ["files", "hosts", "patched"]
pytestmark = pytest.mark.slow

CASE = "preferences"
NUM_PAIRS = 200


def pairs(name, num_pairs):
    """Prompts and responses, some of which are longer than their part of a row."""
    return [
        {
            "prompt": f"{name} {n} " * (1 + n % 6),
            "chosen": f"yes {n} " * (1 + n % 5),
            "rejected": f"no {n} " * (1 + n % 7),
        }
        for n in range(num_pairs)
    ]


@pytest.fixture(scope="module")
def maxtext(hosts, tmp_path_factory, files):
    for name, number in (("pairs", NUM_PAIRS), ("held_out", 30)):
        table = pa.Table.from_pylist(pairs(name, number))
        corpora.write_table(files / f"{name}.parquet", table, group_rows=8)
    made = test_real_maxtext.MaxText(hosts, tmp_path_factory.mktemp("runs"), files)
    return with_preferences(made, files)


def with_preferences(made, files):
    """Adds the case to a MaxText."""
    made.add(
        CASE,
        # Tunix's adapter knows models by their names.
        model_name="llama3.1-8b",
        override_model_config=True,
        use_dpo=True,
        dataset_type="grain",
        grain_train_files=f"{files}/pairs.parquet",
        grain_file_type="parquet",
        train_data_columns="['prompt','chosen','rejected']",
        grain_eval_files=f"{files}/held_out.parquet",
        eval_data_columns="['prompt','chosen','rejected']",
        eval_interval=EVAL_INTERVAL,
        eval_steps=2,
        vocab_size=32000,
        tokenizer_type="sentencepiece",
        tokenizer_path=environment.TOKENIZERS / "tokenizer.llama2",
    )
    return made


def check_is_part_of(whole, logs, *, begin, end):
    """The steps from begin to end of a run are those of the uninterrupted one."""
    expected, actual = environment.batches(whole), environment.batches(logs)
    assert len(expected["train"]) == STEPS
    assert actual["train"] == expected["train"][begin:end]
    # There is an evaluation before the first step, too; each has the same batches.
    evaluated = expected["eval"][:2]
    num_evaluations = 1 + end // EVAL_INTERVAL - begin // EVAL_INTERVAL
    assert actual["eval"] == evaluated * num_evaluations

    expected, actual = environment.losses(whole), environment.losses(logs)
    assert sorted(expected["train"]) == list(range(1, STEPS + 1))
    wanted = range(begin + 1, end + 1)
    assert actual["train"] == {step: expected["train"][step] for step in wanted}


def check_run(maxtext, name, *, hosts, steps=STEPS):
    directory = str(maxtext.checkpoints(name).parent)
    audited = run_audit.RunAudit(directory).outcome()
    assert audited.passed, audited
    assert list(audited.hosts) == hosts
    assert audited.num_row_identical_steps == audited.num_steps == steps
    shown = status.collect(directory)
    assert (shown.phase, shown.progress.step) == ("finished", steps)
    # Tunix counts from 1.
    assert {each.tier: each.step for each in shown.tiers}["persistent"] == steps
    saved = maxtext.checkpoints(name) / str(steps)
    assert {"model_params", "optimizer_state", "iter"} <= {
        each.name for each in saved.iterdir()
    }
    return shown.progress.loss


@pytest.mark.usefixtures("maxtext")
@pytest.mark.night
def test_rows_are_those_that_maxtext_makes_of_the_same_pairs(files):
    environment.run("tests.maxtext.pairs", files / "pairs.parquet")


@pytest.mark.night
@pytest.mark.parametrize("in_tiers", [False, True])
def test_a_run_on_other_numbers_of_hosts_is_that_of_one(maxtext, in_tiers):
    name, begin = f"preferences-{in_tiers}", 0
    whole = maxtext.uninterrupted(CASE)
    with shared_memory.directory("maxtext") as ram:
        settings = {}
        if in_tiers:
            settings = {
                "enable_multi_tier_checkpointing": True,
                "local_checkpoint_directory": ram,
                "local_checkpoint_period": 3,
                "local_checkpoint_size_limit": "128Mi",
                "multi_tier_checkpointing_backup_interval_steps": 1000,
                "async_checkpointing": True,
            }
        for steps, num_hosts in ((7, 2), (STEPS, 1)):
            logs = maxtext.run(CASE, name, steps=steps, num_hosts=num_hosts, **settings)
            check_is_part_of(whole, logs, begin=begin, end=steps)
            begin = steps
        # With the optimizer of one run: a sum of two hosts has other last digits.
        loss = check_run(maxtext, name, hosts=[2, 1])
        at_once = check_run(maxtext, whole.name.rpartition("-")[0], hosts=[1])
        assert loss == pytest.approx(at_once, rel=1e-5)


@pytest.mark.night
def test_tunix_goes_on_from_what_we_saved_and_we_not_from_what_it_did(maxtext):
    whole = maxtext.uninterrupted(CASE)
    name = whole.name.rpartition("-")[0]
    saved = maxtext.checkpoints(name)
    shutil.copytree(saved.parent, saved.parent.with_name("by_tunix"))
    logs = maxtext.run(CASE, "by_tunix", steps=STEPS + 1, num_hosts=1, program="stock")
    assert sorted(environment.losses(logs)["train"]) == [STEPS + 1]

    refused = maxtext.run(CASE, "by_tunix", steps=STEPS + 2, num_hosts=1, codes=[1])
    log = (refused / "0.log").read_text()
    assert f"step {STEPS + 1} in {maxtext.checkpoints('by_tunix')} has no data" in log
    assert "set another run_name" in log


@pytest.mark.night
def test_through_the_patch_it_has_the_same_rows_and_losses(maxtext, patched, files):
    whole = maxtext.uninterrupted(CASE)
    logs = with_preferences(patched, files).run(CASE, "patched", steps=7, num_hosts=1)
    check_is_part_of(whole, logs, begin=0, end=7)


@pytest.mark.night
def test_parts_of_a_batch_make_the_same_steps_until_the_data_ends(maxtext):
    # With ORPO, which has no model of reference.
    settings = {
        "dpo.algo": "orpo",
        "num_epoch": 1,
        "eval_interval": -1,
        "checkpoint_period": 100,
    }
    wholly, parted = (
        maxtext.run(
            CASE,
            f"parts-{parts}",
            steps=NUM_PAIRS,
            num_hosts=1,
            per_device_batch_size=40 // parts,
            gradient_accumulation_steps=parts,
            **settings,
        )
        for parts in (1, 2)
    )
    assert environment.batches(wholly) == environment.batches(parted)
    # Of the tokens MaxText counts those of the last part.
    losses = [
        {step: loss for step, (_, loss, _) in environment.losses(logs)["train"].items()}
        for logs in (wholly, parted)
    ]
    assert [len(each) for each in losses] == [NUM_PAIRS // 40] * 2
    assert losses[0] == losses[1]
    for parts in (1, 2):
        check_run(maxtext, f"parts-{parts}", hosts=[1], steps=NUM_PAIRS // 40)


@pytest.mark.night
def test_a_live_run_loses_a_slice_and_gets_it_back(maxtext):
    name, steps, rows = "live_preferences", STEPS, 8
    whole = maxtext.uninterrupted(CASE)
    with shared_memory.directory("maxtext") as ram:
        logs = maxtext.run(
            CASE,
            name,
            num_hosts=1,
            program="elastic",
            per_device_batch_size=rows // 2,
            hosts=2,
            slices=2,
            elastic_enabled=True,
            elastic_min_slice_count=1,
            elastic_settle_seconds=0,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=3,
            local_checkpoint_size_limit="128Mi",
            multi_tier_checkpointing_backup_interval_steps=8,
            peer_copies=1,
            faults="[{kill_slice: 1, at_step: 5}, {return_slice: 1, at_step: 9}]",
            steps=steps,
        )
    run = maxtext.checkpoints(name).parent
    started = runs.events(run, "run_started")
    assert [event["hosts"] for event in started] == [2, 1, 2]
    (lost,) = runs.events(run, "slice_lost")
    assert lost["slice"] == 1
    expected = environment.batches(whole)["train"]
    worlds = environment.worlds(logs)
    assert [begin for begin, _ in worlds] == [event["start_step"] for event in started]
    for begin, seen in worlds:
        assert seen
        assert seen == expected[begin : begin + len(seen)]
    assert begin + len(seen) == steps
    audited = run_audit.RunAudit(str(run)).outcome()
    assert audited.passed, audited
