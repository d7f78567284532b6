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
from elastic_ckpt.training import report, run_audit
from tests import corpora, runs, shared_memory
from tests.maxtext import environment
from tests.processes import supervisors

pytestmark = pytest.mark.slow

ROWS = 8
# A run of this many steps is done on so many hosts, one stage after the other.
STAGES = ((10, 2), (15, 1), (20, 4))
STEPS = STAGES[-1][0]
# Each format and way to read changes its hosts, and some of them in all of these ways.
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
    """Files of every format."""
    directory = tmp_path_factory.mktemp("texts")
    written = {
        "a.array_record": corpora.write_arrayrecord,
        "b.array_record": corpora.write_arrayrecord,
        "held_out.array_record": corpora.write_arrayrecord,
        "c.parquet": corpora.write_parquet,
        "d.tfrecord": corpora.write_tfrecord,
    }
    for name, write in written.items():
        write(directory / name, texts(name[0], 43 if name[0] == "h" else 400))
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
        "tfrecord_chunked": {
            "grain_train_files": f"{files}/d.tfrecord",
            "grain_file_type": "tfrecord",
            "use_truncation": False,
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

    def add(self, case, **settings):
        """Adds a case of other files."""
        self._cases[case] = settings

    def run(
        self,
        case,
        name,
        *,
        steps,
        num_hosts,
        program="ours",
        codes=None,
        dies=None,
        spoils=None,
        **settings,
    ):
        """A run to a number of steps; the directory of its logs and batches."""
        ours = {} if program == "stock" else OURS
        rows = {"per_device_batch_size": ROWS // num_hosts}
        logs = self._directory / "logs" / f"{name}-{steps}"
        settings = {"steps": steps, **ours, **rows, **settings}
        written = self.arguments(case, name, **settings)
        lines = self._hosts.run(
            num_hosts=num_hosts,
            directory=logs,
            program=program,
            arguments=written,
            dies_before_step=dies,
            spoils_step=spoils,
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


def test_fine_tuning_on_conversations_is_that_of_one_host(maxtext):
    case, begin = "sft", 0
    whole = maxtext.uninterrupted(case)
    # Of each row the answers alone count.
    losses = environment.losses(whole)["train"]
    counted = [int(weights) for weights, *_ in losses.values()]
    assert 0 < max(counted) < ROWS * MODEL["max_target_length"] * 0.8
    for steps, num_hosts in FEWER:
        logs = maxtext.run(case, case, steps=steps, num_hosts=num_hosts)
        check_is_part_of(whole, logs, begin=begin, end=steps)
        begin = steps
    check_verbs(maxtext, case, hosts=[num_hosts for _, num_hosts in FEWER])


IN_SIDECAR = {"colocated_python_data_input": True}


@pytest.mark.night
@pytest.mark.parametrize(
    ("case", "settings", "stages"),
    [
        ("arrayrecord", {}, STAGES),
        ("packed_parquet", {}, FEWER),
        ("mixture", {}, FEWER),
        ("tfrecord_chunked", {}, MORE),
        ("eval", {}, FEWER),
        ("packed_parquet", IN_SIDECAR, FEWER),
        ("mixture", IN_SIDECAR, STAGES),
        ("eval", IN_SIDECAR, MORE),
    ],
)
def test_a_run_on_other_numbers_of_hosts_is_that_of_one(
    maxtext, case, settings, stages
):
    whole = maxtext.uninterrupted(case)
    name, begin = "-".join([case, *settings]), 0
    for steps, num_hosts in stages:
        logs = maxtext.run(case, name, steps=steps, num_hosts=num_hosts, **settings)
        check_is_part_of(whole, logs, begin=begin, end=steps)
        begin = steps
    check_verbs(maxtext, name, hosts=[num_hosts for _, num_hosts in stages])


@pytest.mark.parametrize("settings", [{}, IN_SIDECAR])
@pytest.mark.night
def test_a_ramp_of_batches_is_that_of_one_host_however_often_it_is_continued(
    maxtext, settings
):
    # Batches of 16, 24 and 32 rows, which move the shards between the hosts.
    ramp = {
        "enable_rampup_batch_size": True,
        "global_rampup_samples": 80,
        "num_logical_shards": 12,
    }

    def of_hosts(num_hosts):
        return ramp | {
            "per_device_batch_size": 32 // num_hosts,
            "per_device_batch_size_start": 16 // num_hosts,
            "per_device_batch_size_increment": 8 // num_hosts,
        }

    case, name = "packed_parquet", "-".join(["ramp", *settings])
    whole = maxtext.run(
        case, f"{name}-whole", steps=8, num_hosts=1, **of_hosts(1), **settings
    )
    expected = environment.batches(whole)["train"]
    assert list(map(len, expected)) == [16, 16, 16, 24, 24, 32, 32, 32]
    begin = 0
    for end, num_hosts in ((4, 2), (5, 4), (8, 2)):
        logs = maxtext.run(
            case,
            name,
            steps=end,
            num_hosts=num_hosts,
            **of_hosts(num_hosts),
            **settings,
        )
        assert environment.batches(logs)["train"] == expected[begin:end]
        begin = end
    assert run_audit.RunAudit(str(maxtext.checkpoints(name).parent)).outcome().passed


def check_verbs(maxtext, name, *, hosts, steps=STEPS):
    """The verbs that read a run's directory take this one."""
    directory = str(maxtext.checkpoints(name).parent)
    audited = run_audit.RunAudit(directory).outcome()
    assert audited.passed, audited
    assert list(audited.hosts) == hosts
    assert audited.num_row_identical_steps == audited.num_steps == steps
    shown = status.collect(directory)
    assert (shown.phase, shown.progress.step) == ("finished", steps)
    assert shown.progress.loss is not None
    assert {each.tier: each.step for each in shown.tiers}["persistent"] == steps - 1
    recorded = report.collect(directory)
    assert sum(len(each.records) for each in recorded.attempts) >= steps
    with pytest.raises(ec.ElasticCkptError, match="elastic_enabled=true"):
        scale.run(argparse.Namespace(run=directory, slices=1, no_wait=True))


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


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.night
def test_it_goes_back_to_storage_if_the_copy_in_ram_was_corrupt(maxtext, num_hosts):
    case, name = "packed_parquet", f"corrupt-{num_hosts}"
    whole = maxtext.uninterrupted(case)
    with shared_memory.directory("maxtext") as ram:
        settings = {
            "enable_multi_tier_checkpointing": True,
            "local_checkpoint_directory": ram,
            "local_checkpoint_period": 1,
            "local_checkpoint_size_limit": "64Mi",
            "multi_tier_checkpointing_backup_interval_steps": 4,
        }
        maxtext.run(case, name, steps=10, num_hosts=num_hosts, spoils=9, **settings)
        # Of steps that wait for the backup of an earlier one, the newest is stored.
        good = max(each for each in stored_steps(maxtext, name) if each < 9)
        logs = maxtext.run(case, name, steps=STEPS, num_hosts=num_hosts, **settings)
        log = (logs / "0.log").read_text()
        (back,) = re.findall(r"after step 9 .* goes back to step (\d+) in", log)
        back = int(back)
        assert back == good
        expected, actual = environment.batches(whole), environment.batches(logs)
        # One step is trained, or two, until MaxText sees the loss.
        begin = len(actual["train"]) - (STEPS - 1 - back)
        assert begin in (1, 2)
        assert actual["train"][:begin] == expected["train"][10 : 10 + begin]
        assert actual["train"][begin:] == expected["train"][back + 1 :]
        losses = environment.losses(whole)["train"]
        assert environment.losses(logs)["train"] == {
            step: losses[step] for step in range(back + 1, STEPS)
        }
        # The other run has two parts: from step 9, and from the step in storage.
        check_verbs(maxtext, name, hosts=[num_hosts] * 3)


@pytest.mark.parametrize(("num_batches", "in_ram"), [(1, False), (5, True)])
@pytest.mark.night
def test_the_last_step_is_saved_where_the_data_ends(
    maxtext, files, num_batches, in_ram
):
    name = f"ends_after_{num_batches}_{in_ram}"
    settings = {
        "num_epoch": 1,
        "checkpoint_period": 3,
        "save_checkpoint_on_completion": True,
        "grain_train_files": corpora.write_arrayrecord(
            files / f"{name}.array_record", texts("e", ROWS * num_batches)
        ),
    }
    with shared_memory.directory("maxtext") as ram:
        if in_ram:
            settings |= {
                "enable_multi_tier_checkpointing": True,
                "local_checkpoint_directory": ram,
                "local_checkpoint_period": 3,
                "multi_tier_checkpointing_backup_interval_steps": 1000,
            }
        logs = maxtext.run("arrayrecord", name, steps=20, num_hosts=2, **settings)
        log = (logs / "0.log").read_text()
        assert len(environment.batches(logs)["train"]) == num_batches
        assert f"the data ended after step {num_batches} of 20" in log
        names = [path.name for path in maxtext.checkpoints(name).iterdir()]
        assert str(num_batches - 1) in names
        check_verbs(maxtext, name, hosts=[2], steps=num_batches)


@pytest.mark.night
def test_it_continues_from_before_a_checkpoint_that_was_interrupted(maxtext):
    case, name = "mixture", "interrupted"
    whole = maxtext.uninterrupted(case)
    # Worker processes that are killed leave semaphores behind.
    settings = {"async_checkpointing": True, "grain_worker_count": 0}
    killed = maxtext.run(
        case, name, steps=10, num_hosts=2, codes=[-9, -9], dies=8, **settings
    )
    # Steps 0 and 4 are complete, and of 8 there is all but its name.
    left = sorted(path.name for path in maxtext.checkpoints(name).iterdir())
    assert [entry for entry in left if entry.isdigit()] == ["0", "4"]
    assert [entry for entry in left if entry.startswith("8.")]
    seen = environment.batches(killed, killed=True)["train"]
    assert seen == environment.batches(whole)["train"][: len(seen)]
    assert len(seen) >= 9
    begin = 5
    for steps, num_hosts in STAGES[1:]:
        logs = maxtext.run(case, name, steps=steps, num_hosts=num_hosts, **settings)
        check_is_part_of(whole, logs, begin=begin, end=steps)
        begin = steps


def test_an_error_of_one_host_s_data_ends_the_others_too_and_is_named(maxtext, files):
    # In order, record 310 is the eleventh of logical shard 6, which host 1 reads.
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
    assert f"elastic-ckpt maxtext: {written}, record 310: corrupt" in log_texts[1]
    # MaxText would end well, as if there were no more data.
    assert "Training stopped" not in log_texts[1]
    assert sorted(environment.losses(logs)["train"]) == list(range(10))


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
    way_out = f"set load_full_state_path={newest('stock', 2)} and another run_name\n"
    assert (refused / "0.log").read_text().endswith(way_out)

    ours = run("ours", 6, "ours", load_full_state_path=newest("stock", 2))
    assert sorted(environment.losses(ours)["train"]) == [3, 4, 5]

    refused = run("ours", 9, "stock", codes=[1])
    assert "Error restoring Grain checkpoint" in (refused / "0.log").read_text()

    back = run("back", 9, "stock", load_full_state_path=newest("ours", 5))
    assert sorted(environment.losses(back)["train"]) == [6, 7, 8]


# Of live runs: they divide over each number of hosts, and XLA cannot store the order of
# collectives in loops on CPUs.
LIVE = {"base_emb_dim": 24, "num_logical_shards": 24, "scan_layers": False}


def live(slices, ram):
    """The keys of a live run of 24 rows on slices of one host."""
    return {
        **LIVE,
        "per_device_batch_size": 24 // slices,
        "hosts": slices,
        "slices": slices,
        "elastic_enabled": True,
        "elastic_settle_seconds": 0,
        # No machine is lost, however slow this one is.
        "elastic_machine_timeout_seconds": 600,
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 3,
        "local_checkpoint_size_limit": "64Mi",
        "multi_tier_checkpointing_backup_interval_steps": 8,
    }


def check_live(maxtext, name, logs, *, counts, steps):
    """The worlds of a live run have so many hosts, and the rows of one host."""
    whole = maxtext.run(
        "arrayrecord",
        f"{name}-whole",
        num_hosts=1,
        steps=steps,
        per_device_batch_size=24,
        **LIVE,
    )
    expected = environment.batches(whole)["train"]
    assert len(expected) == steps
    worlds = environment.worlds(logs)
    assert len(worlds) == len(counts)
    for begin, seen in worlds:
        assert seen
        assert seen == expected[begin : begin + len(seen)]
    assert begin + len(seen) == steps
    run = maxtext.checkpoints(name).parent
    begun = runs.events(run, "run_started")
    assert [event["hosts"] for event in begun] == counts
    audited = run_audit.RunAudit(str(run)).outcome()
    assert audited.passed, audited
    assert list(audited.hosts) == counts
    assert audited.num_row_identical_steps == audited.num_steps


# The hosts of the worlds, on one machine and on two.
@pytest.mark.parametrize(("machines", "counts"), [(1, [4, 3, 4]), (2, [2, 1, 2])])
@pytest.mark.night
def test_a_live_run_loses_a_slice_and_gets_it_back(maxtext, machines, counts):
    name, steps, slices = f"elastic-{machines}", 20, counts[0]
    supervised = {"elastic_machines": machines} if machines > 1 else {}
    with shared_memory.directory("maxtext") as ram:
        logs = maxtext.run(
            "arrayrecord",
            name,
            num_hosts=machines,
            program="elastic",
            steps=steps,
            elastic_min_slice_count=slices - 1,
            faults="[{kill_slice: 1, at_step: 5}, {return_slice: 1, at_step: 9}]",
            **live(slices, ram),
            **supervised,
        )
    check_live(maxtext, name, logs, counts=counts, steps=steps)
    run = maxtext.checkpoints(name).parent
    (lost,) = runs.events(run, "slice_lost")
    assert lost["slice"] == 1
    assert [event["step"] for event in runs.events(run, "run_finished")] == [steps]
    # The third world has the program of the first.
    compiled = len(runs.events(run, "compile_started"))
    assert (compiled, len(runs.events(run, "executable_loaded"))) == (2, 1)


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


@pytest.mark.night
def test_a_live_run_goes_on_without_a_machine_and_takes_it_in_again(maxtext, tmp_path):
    name = "machines"
    run = maxtext.checkpoints(name).parent
    with shared_memory.directory("maxtext") as ram:
        arguments = maxtext.arguments(
            "arrayrecord",
            name,
            steps=1_000_000,
            elastic_machines=2,
            elastic_min_slice_count=1,
            **OURS | live(2, ram),
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
    (stopped,) = runs.events(run, "run_stopped")
    # MaxText counts the saved step from 0.
    steps = stopped["step"] + 1
    check_live(maxtext, name, tmp_path, counts=[2, 1, 2, 1, 2], steps=steps)
    # Each step that a world began with was in the memory of a machine.
    restored = runs.events(run, "restored_from")
    assert [each["persistent_bytes"] for each in restored] == [0] * 4
