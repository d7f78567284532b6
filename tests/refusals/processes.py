"""Mistakes in what a run is started with: its settings, its data, or what it has saved.

A run is started in this process, as the verb `train` does it.
"""

import atexit
import functools
import pathlib
import shutil
import tempfile

from elastic_ckpt.core import errors, storage
from elastic_ckpt.monitoring import progress
from elastic_ckpt.training import configured, job, journal, load, training_files
from tests import corpora, runs
from tests.refusals import Refusal


@functools.cache
def _made() -> pathlib.Path:
    """A directory with data, and a run of 4 steps on it."""
    directory = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    corpora.write_texts(directory / "texts.array_record", num_texts=100)
    texts = [{"text": f"text {number} " * 4} for number in range(60)]
    corpora.write_parquet(directory / "a.parquet", texts)
    _train(_config(directory), "steps=4")
    return directory


def _train(path, *overrides):
    config = load.load(path, overrides)
    configured.check_checkpoints(config)
    with progress.Progress(config.run.log_period) as shown:
        config = training_files.prepare(config)
        with (
            journal.kept(config, shown) as emit,
            job.alone(config, emit) as world,
        ):
            job.train(config, world)


def _config(base, **settings):
    values = {
        "base_output_directory": str(base),
        "colocated_python_data_input": False,
        **settings,
    }
    with tempfile.TemporaryDirectory() as directory:
        texts = str(_texts(base))
        written = runs.write_config(pathlib.Path(directory), texts, **values)
        path = pathlib.Path(tempfile.mkstemp(suffix=".yml")[1])
        shutil.copy(written, path)
    atexit.register(path.unlink)
    return path


def _texts(base):
    own = base / "texts.array_record"
    return own if own.exists() else _made() / "texts.array_record"


def starting(**settings):
    """Starts a run in an empty directory."""

    def call(directory):
        config = _config(directory, **settings)
        _train(config)

    return call


def checking(**settings):
    """Checks the settings of a run of several hosts before they start."""

    def call(directory):
        del directory
        configured.check_local(load.load(_config(_made(), **settings)))

    return call


def sharded(**settings):
    """Starts a run on a Parquet file."""

    def call(directory):
        file = str(_made() / "a.parquet")
        chosen = {"grain_train_files": file, "packing": True, "num_logical_shards": 8}
        chosen |= {"grain_file_type": "parquet", **settings}
        chosen["grain_train_files"] = chosen["grain_train_files"].format(file)
        starting(**chosen)(directory)

    return call


def continuing(*overrides, spoil=lambda _: None):
    """Continues a run of four steps, after something has happened to it."""

    def call(directory):
        shutil.copytree(_made() / "tiny", directory / "tiny")
        config = _config(directory)
        spoil(directory / "tiny")
        _train(config, *overrides)

    return call


def while_another_writes(directory):
    (directory / "tiny").mkdir()
    with storage.exclusive_lock(directory / "tiny" / "run.lock"):
        starting()(directory)


def on_empty_data(directory):
    corpora.write_texts(directory / "empty", num_texts=0)
    starting(grain_train_files=str(directory / "empty"))(directory)


def on_a_wrong_mixture(directory):
    path = directory / "mixture.json"
    path.write_text('{"web": {"files": "a", "weight": 1}}')
    sharded(grain_train_mixture_config_path=str(path))(directory)


def data_state_of(change):
    """Changes the state of the data of step 4."""
    return lambda run: change(run / "checkpoints" / "4" / "data" / "data_state.json")


NO_COPY = "step 4: no good copy of data/data_state.json is left .*restore it from a"

REFUSALS = {
    "mistyped key": Refusal(
        lambda _: load.load(_config(_made()), ["hots=2"]),
        "unknown key 'hots'; the nearest key is 'hosts'",
    ),
    "memory that cannot be made": Refusal(
        starting(
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory="/proc/x",
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
        ),
        "the RAM directory /proc/x.* cannot be made .*; set local_check",
        errors.ElasticCkptError,
        writes=True,
    ),
    "missing data": Refusal(
        starting(grain_train_files="/nowhere/*.array_record"),
        r"/nowhere/\*\.array_record matches no file; check the path, or write one with",
        errors.DataError,
    ),
    "texts written to a pattern": Refusal(
        starting(grain_train_files="*.array_record", text_directory="python-stdlib"),
        r"\*\.array_record matches no file",
        errors.DataError,
    ),
    "texts of another format than their name": Refusal(
        starting(grain_train_files="texts.parquet", text_directory="python-stdlib"),
        "set grain_file_type=parquet, or change",
    ),
    "no record": Refusal(on_empty_data, "not one record", errors.DataError, True),
    "hosts that do not divide the batch": Refusal(
        checking(hosts=3),
        "a global batch of 8 rows cannot be divided evenly among 3 devices, as JAX",
    ),
    "hosts on one accelerator": Refusal(
        checking(hosts=2, hardware="tpu"),
        "start one process per host with Slurm or a JobSet",
    ),
    "slices of half a host": Refusal(
        checking(hosts=2, slices=4, elastic_enabled=True),
        "a slice must consist of whole hosts",
    ),
    "more slices needed than there are": Refusal(
        checking(hosts=4, slices=4, elastic_enabled=True, elastic_min_slice_count=5),
        "is more than slices=4; lower it",
    ),
    "no such fault": Refusal(
        checking(hosts=4, slices=4, elastic_enabled=True, faults=[{"burn": 1}]),
        "is not a fault; give one of",
    ),
    "a weight below zero": Refusal(
        sharded(grain_train_files="x.parquet,-1;{},2"),
        r"dataset x\.parquet has the weight -1\.0; weights are finite",
    ),
    "no weight above zero": Refusal(
        sharded(grain_train_files="x.parquet,0;{},0"),
        r"all weights of \['a\.parquet', 'x\.parquet'\] are 0; raise one",
    ),
    "a dataset without a weight": Refusal(
        sharded(grain_train_files="x.parquet,1;{}"),
        "has no weight; write patterns,weight;patterns,weight",
    ),
    "a wrong entry of a mixture": Refusal(
        on_a_wrong_mixture,
        r"web has \['files', 'weight'\]; give it weight, and path",
        writes=True,
    ),
    "no logical shards": Refusal(
        sharded(num_logical_shards=0),
        "grain_file_type=parquet needs logical shards; set num_logical",
        writes=True,
    ),
    "files of another format": Refusal(
        sharded(grain_file_type="tfrecord"),
        r"a\.parquet, byte 0: not a TFRecord file, or damaged there",
        errors.DataError,
        writes=True,
    ),
    "a column that is not there": Refusal(
        sharded(train_data_columns="body"),
        r"a\.parquet: no column \['body'\], only \['text', 'tokens'\]",
        errors.DataError,
        writes=True,
    ),
    "fewer steps than are done": Refusal(
        continuing("steps=3"),
        "tiny is already at step 4: steps counts over all starts.* set it above 4",
        writes=True,
    ),
    "a checkpoint of another model": Refusal(
        continuing("base_mlp_dim=48", "steps=8"),
        r"step 4 is a checkpoint of another model: .*saved \[1, 16, 64\], now \[1, 16",
        errors.CheckpointError,
        writes=True,
    ),
    "a checkpoint of another pipeline": Refusal(
        continuing("data_shuffle_seed=3", "steps=8"),
        r"saved by another pipeline \(data_shuffle_seed: saved 0, now 3\)",
        errors.ElasticCkptError,
        writes=True,
    ),
    "a run that another live run writes": Refusal(
        while_another_writes,
        "tiny is being written by another live run .*wait for it, stop it, or use",
        errors.ElasticCkptError,
        writes=True,
    ),
    "a state of the data that is gone": Refusal(
        continuing("steps=8", spoil=data_state_of(pathlib.Path.unlink)),
        NO_COPY,
        errors.CheckpointError,
        writes=True,
    ),
    "a state of the data that is cut": Refusal(
        continuing(
            "steps=8",
            spoil=data_state_of(lambda file: file.write_bytes(file.read_bytes()[:50])),
        ),
        NO_COPY,
        errors.CheckpointError,
        writes=True,
    ),
    "a step without its values": Refusal(
        continuing(
            "steps=8", spoil=lambda run: shutil.rmtree(run / "checkpoints/4/state")
        ),
        "no step is complete in any tier.*restore it from a copy",
        errors.CheckpointError,
        writes=True,
    ),
}
