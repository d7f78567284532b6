"""A small stand-in for MaxText: what elastic_ckpt touches, in modules of that name."""

import contextlib
import importlib
import logging
import pathlib
import sys
import types

from absl import logging as absl_logging

from tests import corpora

# The keys of MaxText's base.yml that are read, and files.
DEFAULTS = {
    "add_bos": True,
    "add_eos": True,
    "async_checkpointing": True,
    "base_output_directory": "",
    "chat_template": "",
    "chat_template_path": "",
    "checkpoint_dir": "",
    "checkpoint_period": 4,
    "data_shuffle_seed": 0,
    "elastic_enabled": False,
    "enable_autocheckpoint": False,
    "enable_checkpointing": True,
    "enable_data_shuffling": True,
    "enable_multi_tier_checkpointing": False,
    "eval_data_columns": ["text"],
    "eval_interval": -1,
    "eval_steps": -1,
    "grain_eval_files": "",
    "grain_file_type": "arrayrecord",
    "grain_packing_type": "first_fit",
    "grain_per_worker_buffer_size": 1,
    "grain_shuffle_buffer_size": 100,
    "grain_train_files": "/data/a*",
    "grain_train_mixture_config_path": "",
    "grain_worker_count": 1,
    "local_checkpoint_directory": "",
    "local_checkpoint_period": 0,
    "max_num_checkpoints_to_keep": None,
    "max_segments_per_seq": -1,
    "max_target_length": 2048,
    "multi_tier_checkpointing_backup_interval_minutes": None,
    "multi_tier_checkpointing_backup_interval_steps": None,
    "num_epoch": 1,
    "num_slices": 1,
    "packing": True,
    "run_name": "first",
    "save_checkpoint_on_completion": True,
    "sft_train_on_completion_only": False,
    "steps": 3,
    "tokenize_eval_data": True,
    "tokenize_train_data": True,
    "tokenizer_path": "/models/llama2",
    "tokenizer_type": "sentencepiece",
    "train_data_columns": ["text"],
    "use_sft": False,
    "use_truncation": True,
    "vocab_size": 32000,
}

FIELDS = DEFAULTS | {
    "colocated_python_data_input": False,
    "dataset_type": "synthetic",
    "enable_continuous_checkpointing": False,
    "enable_rampup_batch_size": False,
    "eval_per_device_batch_size": 12,
    "global_rampup_samples": 500,
    "grain_use_elastic_iterator": False,
    "per_device_batch_size": 12,
    "per_device_batch_size_increment": 2.0,
}


def config(**settings):
    """A configuration of MaxText, with its keys as attributes."""
    return types.SimpleNamespace(**{**DEFAULTS, **settings})


MODULES = {
    "configs/types.py": """
FIELDS = {fields!r}

class MaxTextConfig:
    model_fields = dict.fromkeys(FIELDS)
""",
    "configs/pyconfig.py": """
import sys
import types as python_types

import jax

from maxtext.configs import types

def _prepare_for_pydantic(raw_keys, config_class=types.MaxTextConfig):
    for key in raw_keys:
        if key not in config_class.model_fields:
            raise ValueError(f"{{key!r}} is unknown")
    if raw_keys["vocab_size"] < 0:
        raise ValueError("vocab_size is negative")
    if raw_keys.get("grain_use_elastic_iterator") and raw_keys.get("packing"):
        raise ValueError("the elastic iterator does not pack")
    return raw_keys

def _initialize_pydantic(argv):
    raw_keys = _prepare_for_pydantic(types.FIELDS | argv)
    assert not raw_keys["enable_multi_tier_checkpointing"], "it waits for GKE"
    for prefix, suffix in (("", ""), ("eval_", "_eval")):
        rows = raw_keys[f"{{prefix}}per_device_batch_size"] * jax.device_count()
        raw_keys[f"global_batch_size_to_load{{suffix}}"] = int(rows)
    return python_types.SimpleNamespace(**raw_keys)

def initialize(argv):
    try:
        return _initialize_pydantic(argv)
    except Exception as error:
        print("MAXTEXT CONFIG ERROR:", error)
        sys.exit(2)
""",
    "input_pipeline/input_pipeline_interface.py": """
def create_data_iterator(config, mesh):
    raise AssertionError("MaxText's own iterators")
""",
    "common/checkpointing.py": """
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

# Of the state that is restored; None is that of a number.
SHAPE = None

class PlaceHolderDataIterator:
    pass

def reached_preemption(checkpoint_manager, step):
    return False

def _handle_post_checkpoint_preemption(checkpoint_manager, step):
    return reached_preemption(checkpoint_manager, step)

def maybe_save_checkpoint(checkpoint_manager, state, config, data_iterator, step=None):
    # The state is the number of the last step.
    asks = step is not None and config.enable_autocheckpoint
    stops = asks and reached_preemption(checkpoint_manager, step)
    if step is None or stops or checkpoint_manager.should_save(step):
        if checkpoint_manager.latest is None or checkpoint_manager.latest.step != state:
            assert isinstance(data_iterator, PlaceHolderDataIterator)
            checkpoint_manager.save_checkpointables(
                state, {{"items": {{"step": np.asarray(state)}}}}
            )

def load_state_if_possible(checkpoint_manager, data_iterator):
    assert isinstance(checkpoint_manager, ocp.training.Checkpointer)
    assert isinstance(data_iterator, PlaceHolderDataIterator)
    step = checkpoint_manager.latest.step
    wanted = {{"items": {{"step": jnp.zeros(SHAPE, int) if SHAPE else np.int64()}}}}
    restored = checkpoint_manager.load_checkpointables(step, wanted)
    return int(restored["items"]["step"]) + 1
""",
    "common/metric_logger.py": """
class MetricLogger:
    # Writes the metrics of a step when those of the next one come.

    def __init__(self, config, learning_rate_schedule, start_step=0):
        self.buffered = None

    def write_metrics(self, metrics, step, metric_type="train"):
        pass

    def flush(self):
        if self.buffered is not None:
            self.write_metrics(*self.buffered)

    def buffer_and_write_metrics(self, metrics, step, time_delta, is_training=True):
        self.flush()
        metrics["scalar"]["learning/current_learning_rate"] = 0.1
        self.buffered = metrics, step
""",
    "utils/rampup_batch.py": """
import jax

class RampupBatchManager:
    # Each stage has half of the rows of the ramp.

    def __init__(self, config, step_num):
        self.end = jax.device_count() * config.per_device_batch_size
        self.increment = jax.device_count() * config.per_device_batch_size_increment
        self.global_batch_size_current = self.end - 2 * self.increment
        self.rows_of_stage = config.global_rampup_samples / 2
        self.used = 0
        for _ in range(step_num):
            self.update()

    def update(self):
        self.used += self.global_batch_size_current
        if self.used >= self.rows_of_stage:
            self.used = 0
            self.global_batch_size_current = min(
                self.global_batch_size_current + self.increment, self.end
            )
""",
    "utils/train_utils.py": """
from maxtext.input_pipeline import input_pipeline_interface

def create_checkpoint_manager(config, mesh, init_state_fn):
    raise AssertionError("MaxText's own manager")

def setup_train_loop(config, mesh):
    manager = create_checkpoint_manager(config, mesh, None)
    assert not config.enable_rampup_batch_size, "its own loader of a ramp"
    assert config.global_batch_size_to_load % mesh.size == 0, "IndivisibleError"
    train, evaluation = input_pipeline_interface.create_data_iterator(config, mesh)
    return manager, train, evaluation
""",
    "trainers/pre_train/train.py": """
import ast
from urllib import request

import jax

from maxtext.common import checkpointing, metric_logger
from maxtext.configs import pyconfig
from maxtext.utils import train_utils

BATCHES = []
# Whether steps are saved as they are due, and not the last one alone.
SAVES_STEPS = False
# A page that is fetched, and printed, when the run begins.
FETCHES = None

def train_loop(config, step):
    return metric_logger.MetricLogger(
        config=config, learning_rate_schedule=None, start_step=step
    )

def training_loop_iteration(config, checkpointer, train, step, logger):
    try:
        BATCHES.append(next(train))
    except Exception as error:
        print("Training stopped:", error)
        return False
    if SAVES_STEPS:
        checkpointing.maybe_save_checkpoint(checkpointer, step, config, train, step)
    scalars = {{"learning/loss": 5.0 - step / 8, "learning/total_weights": 100}}
    logger.buffer_and_write_metrics({{"scalar": scalars}}, step, None)
    return not checkpointing._handle_post_checkpoint_preemption(checkpointer, step)

def main(argv):
    pairs = (argument.split("=", 1) for argument in argv[1:])
    keys = {{key: literal(value) for key, value in pairs}}
    config = pyconfig.initialize(keys)
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    checkpointer, train, evaluation = train_utils.setup_train_loop(config, mesh)
    step = 0
    if checkpointer.latest is not None:
        step = checkpointing.load_state_if_possible(checkpointer, train)
    BATCHES.clear()
    if FETCHES:
        with request.urlopen(FETCHES) as page:
            print(page.read().decode())
    logger = train_loop(config, step)
    for step in range(step, config.steps):
        if not training_loop_iteration(config, checkpointer, train, step, logger):
            return
    if evaluation:
        evaluation.reset()
        BATCHES.extend(evaluation)
    checkpointing.maybe_save_checkpoint(checkpointer, step, config, train)
    checkpointer.wait()
    logger.flush()

def literal(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
""",
}


def write_texts(directory: pathlib.Path) -> None:
    """Writes the files `texts`, and `held_out` for an evaluation."""
    texts = [{"text": f"text {number} " * (number % 9)} for number in range(60)]
    held_out = [{"text": f"held out {number}"} for number in range(13)]
    corpora.write_arrayrecord(directory / "texts", texts)
    corpora.write_arrayrecord(directory / "held_out", held_out)


def arguments(data: pathlib.Path, directory: pathlib.Path, **settings) -> list[str]:
    """Those of a short run on `write_texts(data)`, which writes into `directory`."""
    keys = {
        "base_output_directory": f"{directory}/runs",
        "checkpoint_dir": f"{directory}/checkpoints",
        "grain_train_files": f"{data}/texts",
        "grain_worker_count": 0,
        "num_epoch": 0,
        "num_logical_shards": 8,
        "tokenizer_type": "bytes",
        "max_target_length": 24,
        "per_device_batch_size": 1,
        "eval_per_device_batch_size": 1,
        "packing": True,
        **settings,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def write(directory: pathlib.Path, *, version="0.2.5", **changes):
    """Writes the package.

    Args:
      directory: of it; to be put on the path of modules.
      version: that it reports.
      changes: by the name of a module, a text and what to write in its place.
    """
    for name, text in MODULES.items():
        path = directory / "maxtext" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("{fields!r}", repr(FIELDS))
        text = text.replace("{{", "{").replace("}}", "}")
        old, new = changes.get(path.stem, ("", ""))
        assert old in text
        path.write_text(text.replace(old, new) if old else text)
    info = directory / f"maxtext-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Name: maxtext\nVersion: {version}\n")


@contextlib.contextmanager
def installed(directory: pathlib.Path, **changes):
    """Has the package on the path of modules until the block ends; see `write`."""
    write(directory, **changes)
    forget()
    handlers, verbosity = logging.root.handlers[:], absl_logging.get_verbosity()
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        logging.root.handlers[:] = handlers
        absl_logging.set_verbosity(verbosity)
        forget()


def forget():
    """Has Python import the package anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == "maxtext"]:
        del sys.modules[name]
    importlib.invalidate_caches()
