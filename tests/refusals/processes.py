"""Mistakes in what a run is started with: its settings, its data, or what it has saved.

A run is started in this process, as the verb `train` does it.
"""

import atexit
import functools
import pathlib
import shutil
import tempfile

from elastic_ckpt.core import errors, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import progress
from elastic_ckpt.training import configured, journal, launch, load, trainer
from tests import corpora, runs
from tests.refusals import Refusal


@functools.cache
def _made() -> pathlib.Path:
    """A directory with data, and a run of 4 steps on it."""
    directory = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    corpora.write_texts(directory / "texts.array_record", num_texts=100)
    _train(_config(directory), "steps=4")
    return directory


def _train(path, *overrides):
    config = load.load(path, overrides)
    configured.check_checkpoints(config)
    with progress.Progress(config.run.log_period) as shown:
        config = launch.with_files(config)
        with (
            journal.kept(journal.path_of(config), shown) as emit,
            trainer.alone(config, emit) as world,
        ):
            trainer.train(config, world)


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
        _train(_config(directory, **settings))

    return call


def continuing(*overrides, spoil=lambda _: None):
    """Continues a run of four steps, after something has happened to it."""

    def call(directory):
        shutil.copytree(_made() / "tiny", directory / "tiny")
        config = _config(directory)
        spoil(directory / "tiny")
        before = _steps(directory)
        try:
            _train(config, *overrides)
        finally:
            assert _steps(directory) == before

    return call


def _steps(directory):
    files = (directory / "tiny" / "checkpoints").rglob("*")
    # But for who wrote last; and what the run was last started with.
    steps = [path for path in files if path.is_file() and path.parent.name != "worlds"]
    steps.append(directory / "tiny" / run_files.RECORD)
    return {path: path.read_bytes() for path in steps}


def while_another_writes(directory):
    (directory / "tiny").mkdir()
    with storage.exclusive_lock(directory / "tiny" / "run.lock"):
        starting()(directory)


def on_empty_data(directory):
    corpora.write_texts(directory / "empty", num_texts=0)
    starting(grain_train_files=str(directory / "empty"))(directory)


REFUSALS = {
    "no record": Refusal(
        on_empty_data, "have no records; rewrite", errors.DataError, True
    ),
    "fewer steps than are done": Refusal(
        continuing("steps=3"),
        "tiny is already at step 4; steps is the total over all launches.* it above 4",
        writes=True,
    ),
    "a checkpoint of another model": Refusal(
        continuing("base_mlp_dim=48", "steps=8"),
        r"step 4 is a checkpoint of a different model: .*saved \[1, 16, 64\], now \[1",
        errors.CheckpointError,
        writes=True,
    ),
    "a checkpoint of another pipeline": Refusal(
        continuing("data_shuffle_seed=3", "steps=8"),
        r"saved by a different pipeline \(data_shuffle_seed: saved 0, now 3\)",
        errors.ElasticCkptError,
        writes=True,
    ),
    "a run that another live run writes": Refusal(
        while_another_writes,
        "tiny is being written by another live run .*wait for that run to finish",
        errors.ElasticCkptError,
        writes=True,
    ),
    "a state of the data that is gone": Refusal(
        continuing(
            "steps=8",
            spoil=lambda run: (run / "checkpoints/4/data/data_state.json").unlink(),
        ),
        "step 4: no good copy of data/data_state.json is left .*restore its files",
        errors.CheckpointError,
        writes=True,
    ),
    "a step without its values": Refusal(
        continuing(
            "steps=8", spoil=lambda run: shutil.rmtree(run / "checkpoints/4/state")
        ),
        "no step is complete in any tier.*restore its files from elsewhere",
        errors.CheckpointError,
        writes=True,
    ),
}
