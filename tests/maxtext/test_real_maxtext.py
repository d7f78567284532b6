"""The MaxText of PyPI, unmodified, on one host and on others, continued from each."""

import argparse
import re
import shutil
import subprocess

import pyarrow as pa
import pytest

import elastic_ckpt as ec
from elastic_ckpt.cli import scale
from elastic_ckpt.inspect import status
from elastic_ckpt.training import audit, report
from tests import corpora, runs, shared_memory
from tests.maxtext import environment
from tests.processes import supervisors

pytestmark = pytest.mark.night

ROWS = 8
# A run of this many steps is done on so many hosts, one stage after the other.
STAGES = ((10, 2), (15, 1), (20, 4))
STEPS = STAGES[-1][0]
FEWER = ((10, 2), (STEPS, 1))
MORE = ((10, 1), (STEPS, 2))
EVAL_INTERVAL = 5

MODEL = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "vocab_size": 259,
    "max_target_length": 32,
    "dtype": "float32",
    "attention": "dot_product",
    "learning_rate_schedule_steps": STEPS,
    "hardware": "cpu",
    # The hosts have joined their world already.
    "skip_jax_distributed_system": True,
    "enable_goodput_recording": False,
    "log_config": False,
    "checkpoint_period": 4,
    "async_checkpointing": False,
}
OURS = {
    "num_logical_shards": ROWS,
    "tokenizer_type": "bytes",
    "num_epoch": 0,
    "grain_worker_count": 0,
    "packing": False,
}
# Data that both MaxText's own pipeline and ours can read.
SHARED = {
    "dataset_type": "grain",
    "tokenizer_type": "sentencepiece",
    "tokenizer_path": environment.TOKENIZERS / "tokenizer.llama2",
    "vocab_size": 32000,
    "num_epoch": 100,
    "grain_worker_count": 0,
    "packing": False,
}


# What the loss counts is between the two texts.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}?{% endif %}"
    "{% endfor %}"
)


def chats(num_chats):
    """Conversations of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"u{n} " * (1 + n % 3)},
                {"role": "assistant", "content": f"a{n} " * (1 + n % 5)},
            ]
        }
        for n in range(num_chats)
    ]


def texts(name, num_texts, most=90):
    """Texts of up to `most` letters, or a little more, of their name and number."""
    return [
        {"text": f"{name} {n} " * (1 + (n * 7) % most // (len(name) + 4))}
        for n in range(num_texts)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    for name, num_texts in (("a", 400), ("b", 400), ("held_out", 43)):
        written = texts(name[0], num_texts)
        corpora.write_arrayrecord(directory / f"{name}.array_record", written)
    corpora.write_parquet(directory / "c.parquet", texts("c", 400))
    chatted = pa.Table.from_pylist(chats(400))
    corpora.write_table(directory / "chats.parquet", chatted, group_rows=8)
    (directory / "chat.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    environment.set_up()
    started = environment.Hosts(tmp_path_factory.mktemp("server"))
    yield started
    started.close()


def cases(files):
    return {
        "arrayrecord": {"grain_train_files": f"{files}/a.array_record"},
        "packed_parquet": {
            "grain_train_files": f"{files}/c.parquet",
            "grain_file_type": "parquet",
            "packing": True,
            "grain_packing_type": "first_fit",
        },
        "mixture": {
            "grain_train_files": f"{files}/a.array_record,0.3;"
            f"{files}/b.array_record,0.7",
            "packing": True,
            "grain_packing_type": "concat_then_split",
            "use_truncation": False,
            "grain_worker_count": 1,
        },
        "sft": {
            "use_sft": True,
            "sft_train_on_completion_only": True,
            "grain_train_files": f"{files}/chats.parquet",
            "grain_file_type": "parquet",
            "train_data_columns": "['messages']",
            "chat_template_path": f"{files}/chat.jinja",
            "packing": True,
        },
        "eval": {
            "grain_train_files": f"{files}/a.array_record",
            "grain_eval_files": f"{files}/held_out.array_record",
            "eval_interval": EVAL_INTERVAL,
            "eval_steps": -1,
        },
    }


class MaxText:
    """Runs of MaxText on the same machine, and what is left of them."""

    def __init__(self, hosts, directory, files):
        self._hosts = hosts
        self._directory = directory
        self._cases = cases(files)
        self._done = {}

    def run(
        self, case, name, *, steps, num_hosts, program="ours", codes=None, **settings
    ):
        """A run to a number of steps; the directory of its logs and batches."""
        ours = {} if program == "stock" else OURS
        rows = {"per_device_batch_size": ROWS // num_hosts}
        logs = self._directory / "logs" / f"{name}-{steps}"
        settings = {"steps": steps, **ours, **rows, **settings}
        written = self.arguments(case, name, **settings)
        lines = self._hosts.run(
            num_hosts=num_hosts, directory=logs, program=program, arguments=written
        )
        wanted = codes or [0] * num_hosts
        assert lines == wanted, (logs / "0.log").read_text()[-5000:]
        return logs

    def arguments(self, case, name, **settings):
        """What MaxText is given."""
        keys = {**MODEL, **self._cases[case], **settings}
        keys |= {
            "run_name": name,
            "base_output_directory": f"{self._directory}/runs",
            "jax_cache_dir": f"{self._directory}/jax_cache",
        }
        return [f"{key}={value}" for key, value in keys.items()]

    def uninterrupted(self, case):
        """The run of `case` on one host, in this process's own iterator."""
        if case not in self._done:
            self._done[case] = self.run(
                case, f"{case}-uninterrupted", steps=STEPS, num_hosts=1
            )
        return self._done[case]

    def checkpoints(self, name):
        return self._directory / "runs" / name / "checkpoints"


@pytest.fixture(scope="module")
def maxtext(hosts, tmp_path_factory, files):
    return MaxText(hosts, tmp_path_factory.mktemp("maxtext"), files)


def check_is_part_of(whole, logs, *, begin, end):
    """The steps from begin to end of a run are those of the uninterrupted one."""
    expected, actual = environment.batches(whole), environment.batches(logs)
    assert len(expected["train"]) == STEPS
    assert actual["train"] == expected["train"][begin:end]
    # Each evaluation reads the same, from its beginning.
    evaluations = [step for step in range(begin, end) if step % EVAL_INTERVAL == 0]
    num_batches = len(expected["eval"]) // (STEPS // EVAL_INTERVAL)
    assert actual["eval"] == expected["eval"][:num_batches] * len(evaluations)

    expected, actual = environment.losses(whole), environment.losses(logs)
    assert sorted(expected["train"]) == list(range(STEPS))
    assert actual["train"] == {s: expected["train"][s] for s in range(begin, end)}
    if num_batches:
        assert actual["eval"] == {s: expected["eval"][s] for s in evaluations}


IN_SIDECAR = {"colocated_python_data_input": True}


@pytest.mark.parametrize(
    ("case", "settings", "stages"),
    [
        ("sft", {}, FEWER),
        ("packed_parquet", {}, STAGES),
        ("mixture", IN_SIDECAR, MORE),
        ("eval", {}, FEWER),
    ],
)
def test_a_run_on_other_numbers_of_hosts_is_that_of_one(
    maxtext, case, settings, stages
):
    whole = maxtext.uninterrupted(case)
    if case == "sft":
        # Of each row the answers alone count.
        losses = environment.losses(whole)["train"]
        counted = [int(weights) for weights, *_ in losses.values()]
        assert 0 < max(counted) < ROWS * MODEL["max_target_length"] * 0.8
    begin = 0
    for steps, num_hosts in stages:
        logs = maxtext.run(case, case, steps=steps, num_hosts=num_hosts, **settings)
        check_is_part_of(whole, logs, begin=begin, end=steps)
        begin = steps
    check_verbs(maxtext, case, hosts=[num_hosts for _, num_hosts in stages])


def check_verbs(maxtext, name, *, hosts, steps=STEPS):
    """The verbs that read a run's directory take this one."""
    directory = str(maxtext.checkpoints(name).parent)
    audited = audit.RunAudit(directory).outcome()
    assert audited.passed, audited
    assert list(audited.hosts) == hosts
    assert audited.num_identical_steps == audited.num_steps == steps
    shown = status.collect(directory)
    assert (shown.phase, shown.step) == ("finished", steps)
    assert shown.loss is not None
    assert {each.tier: each.step for each in shown.tiers}["persistent"] == steps - 1
    recorded = report.collect(directory)
    assert sum(len(each.records) for each in recorded.attempts) >= steps
    with pytest.raises(ec.ElasticCkptError, match="elastic_enabled=true"):
        scale.run(argparse.Namespace(run=directory, slices=1))


def stored_steps(maxtext, name):
    steps = maxtext.checkpoints(name).iterdir()
    return [int(each.name) for each in steps if each.name.isdigit()]


def test_in_tiers_it_goes_on_from_ram_and_without_it_from_storage(maxtext):
    case, name, begin = "packed_parquet", "tiers", 0
    whole = maxtext.uninterrupted(case)
    with shared_memory.directory("maxtext") as ram:
        settings = {
            "enable_multi_tier_checkpointing": True,
            "local_checkpoint_directory": ram,
            "local_checkpoint_period": 2,
            "local_checkpoint_size_limit": "64Mi",
            "multi_tier_checkpointing_backup_interval_steps": 3,
            "async_checkpointing": True,
        }
        for (steps, num_hosts), source in zip(
            STAGES, (None, "peers", "persistent storage"), strict=True
        ):
            if source == "persistent storage":
                shutil.rmtree(f"{ram}/{name}")
            logs = maxtext.run(case, name, steps=steps, num_hosts=num_hosts, **settings)
            check_is_part_of(whole, logs, begin=begin, end=steps)
            if source:
                log = (logs / "0.log").read_text()
                (restored,) = re.findall(r"^restored step .*", log, re.MULTILINE)
                assert restored.startswith(f"restored step {begin - 1}: ")
                assert source in restored
            else:
                # A backup that waits for another one gives way to that of a newer step.
                stored = stored_steps(maxtext, name)
                assert any(4 <= each < steps - 1 for each in stored)
            begin = steps
        check_verbs(maxtext, name, hosts=[num_hosts for _, num_hosts in STAGES])


def test_an_error_of_one_host_s_data_ends_the_others_too_and_is_named(maxtext, files):
    # In order, host 1 reads record 310, of logical shard 6, for batch 38 or before it.
    written = corpora.write_arrayrecord(files / "spoilt", texts("s", 400, most=1))
    corpora.spoil(written, b"s 310 ")
    logs = maxtext.run(
        "arrayrecord",
        "one_bad_record",
        steps=50,
        num_hosts=2,
        codes=[1, 1],
        grain_train_files=written,
        enable_data_shuffling=False,
    )
    log_texts = [(logs / f"{host}.log").read_text() for host in (0, 1)]
    assert "elastic-ckpt maxtext" not in log_texts[0]
    assert (
        f"elastic-ckpt maxtext: {written}, record 310: the data is corrupt"
        in log_texts[1]
    )
    # MaxText would end well, as if there were no more data.
    assert "Training stopped" not in log_texts[1]
    trained = sorted(environment.losses(logs)["train"])
    assert trained == list(range(len(trained)))
    assert 0 < len(trained) <= 310 // ROWS


def test_weights_go_over_from_stock_maxtext_and_back(maxtext):
    def run(name, steps, program, *, codes=None, **settings):
        return maxtext.run(
            "arrayrecord",
            name,
            steps=steps,
            num_hosts=1,
            program=program,
            codes=codes,
            **SHARED,
            **settings,
        )

    def newest(name, step):
        return f"{maxtext.checkpoints(name)}/{step}/items"

    begun = run("stock", 3, "stock")
    assert sorted(environment.losses(begun)["train"]) == [0, 1, 2]

    refused = run("stock", 6, "ours", codes=[1])
    assert "elastic-ckpt maxtext: data state" in (refused / "0.log").read_text()

    ours = run("ours", 6, "ours", load_full_state_path=newest("stock", 2))
    assert sorted(environment.losses(ours)["train"]) == [3, 4, 5]

    back = run("back", 9, "stock", load_full_state_path=newest("ours", 5))
    assert sorted(environment.losses(back)["train"]) == [6, 7, 8]


class Machines(supervisors.Supervisors):
    """The supervisors of a live run of MaxText, by the numbers of their machines.

    Args:
      directory: for the logs and batches.
      run: its directory.
      ram: for the memory of all machines.
      arguments: of MaxText.
    """

    def __init__(self, directory, run, ram, arguments):
        self.directory, self.run, self.ram = directory, run, ram
        self._arguments = arguments
        self.started = {}
        for number in range(2):
            self.start(number)

    def start(self, number):
        python = environment.ENVIRONMENT / "bin" / "python"
        own = environment.machine_keys(number)
        with open(self._output(number), "ab") as output:
            self.started[number] = subprocess.Popen(
                [
                    *(python, "-m", "tests.maxtext.machine", self.directory),
                    *(*self._arguments, *own),
                ],
                cwd=environment.ROOT,
                env=environment.variables(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def test_a_live_run_goes_on_without_a_machine_and_takes_it_in_again(maxtext, tmp_path):
    name = "machines"
    run = maxtext.checkpoints(name).parent
    with shared_memory.directory("maxtext") as ram:
        arguments = maxtext.arguments(
            "arrayrecord",
            name,
            **OURS,
            **{"steps": 1_000_000, "per_device_batch_size": ROWS // 2},
            **{"hosts": 2, "slices": 2, "elastic_machines": 2},
            elastic_enabled=True,
            elastic_min_slice_count=1,
            elastic_settle_seconds=0,
            # No machine is lost, however slow this one is.
            elastic_machine_timeout_seconds=600,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=3,
            local_checkpoint_size_limit="64Mi",
            multi_tier_checkpointing_backup_interval_steps=8,
        )
        with Machines(tmp_path, run, ram, arguments) as machines:
            machines.train_on([0, 1])
            first = machines.leader()
            second = 1 - first
            machines.kill(second)
            machines.train_on([first])
            machines.start(second)
            machines.train_on([0, 1])
            # It follows now, and leads when the other one is lost.
            machines.kill(first)
            machines.train_on([second])
            machines.start(first)
            machines.train_on([0, 1])
            assert machines.leaders() == [first, second]
            machines.stop()
    audited = audit.RunAudit(str(run)).outcome()
    assert audited.passed, audited
    assert list(audited.hosts) == [2, 1, 2, 1, 2]
    assert audited.num_identical_steps == audited.num_steps
    # Each step that a world began with was in the memory of a machine.
    restored = runs.events(run, "restored_from")
    assert [each["persistent_bytes"] for each in restored] == [0] * 4
