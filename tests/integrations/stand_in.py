"""A small stand-in for MaxText: what elastic_ckpt touches, in modules of that name."""

import importlib
import pathlib
import sys

from tests.integrations import test_maxtext_config as settings

MODULES = {
    "configs/types.py": """
FIELDS = {fields!r}

class MaxTextConfig:
    model_fields = dict.fromkeys(FIELDS)
""",
    "utils/max_utils.py": """
def initialize_multi_tier_checkpointing(local_checkpoint_directory, **settings):
    raise AssertionError("it waits for GKE's replicator")

def maybe_initialize_jax_distributed_system(raw_keys):
    if raw_keys["enable_multi_tier_checkpointing"]:
        initialize_multi_tier_checkpointing(raw_keys["local_checkpoint_directory"])
""",
    "configs/pyconfig.py": """
import sys
import types as python_types

import jax

from maxtext.configs import types
from maxtext.utils import max_utils

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
    max_utils.maybe_initialize_jax_distributed_system(raw_keys)
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
import numpy as np
from orbax.checkpoint import v1 as ocp

class PlaceHolderDataIterator:
    pass

def reached_preemption(checkpoint_manager, step):
    return False

def _handle_post_checkpoint_preemption(checkpoint_manager, step):
    return reached_preemption(checkpoint_manager, step)

def maybe_save_checkpoint(checkpoint_manager, state, config, data_iterator, step=None):
    # The state is the number of the last step.
    if step is None or checkpoint_manager.should_save(step):
        if checkpoint_manager.latest is None or checkpoint_manager.latest.step != state:
            assert isinstance(data_iterator, PlaceHolderDataIterator)
            checkpoint_manager.save_checkpointables(
                state, {{"items": {{"step": np.asarray(state)}}}}
            )

def load_state_if_possible(checkpoint_manager, data_iterator):
    assert isinstance(checkpoint_manager, ocp.training.Checkpointer)
    assert isinstance(data_iterator, PlaceHolderDataIterator)
    step = checkpoint_manager.latest.step
    wanted = {{"items": {{"step": np.zeros((), int)}}}}
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

    def buffer_and_write_metrics(self, loss, step):
        self.flush()
        scalars = {{
            "learning/loss": loss,
            "learning/total_weights": 100,
            "learning/current_learning_rate": 0.1,
            "perf/step_time_seconds": 0.5,
        }}
        self.buffered = {{"scalar": scalars}}, step
""",
    "common/data_loader.py": """
class DataLoader:
    def __init__(self, config, mesh, data_iterator, goodput_recorder):
        self.data_iterator = data_iterator

    def load_next_batch(self, *args, **kwargs):
        return next(self.data_iterator)

def create_dataloader(config, mesh, data_iterator, goodput_recorder, rampup_manager):
    assert not rampup_manager, "its own loader of a ramp"
    return DataLoader(config, mesh, data_iterator, goodput_recorder)
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

def create_rampup_manager(config, checkpoint_manager):
    if not config.enable_rampup_batch_size:
        return None
    latest = checkpoint_manager.latest
    return RampupBatchManager(config, -1 if latest is None else latest.step)
""",
    "utils/train_utils.py": """
from orbax.checkpoint import v1 as ocp

from maxtext.common.data_loader import create_dataloader
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.utils.rampup_batch import create_rampup_manager

def create_checkpoint_manager(config, mesh, init_state_fn):
    return ocp.training.Checkpointer(config.checkpoint_dir)

def jit_train_and_eval_step(config, model, mesh, state):
    # The state is the number of the last step.
    return lambda state, batch: (state + 1, {{}}), None

def setup_train_loop(config, mesh):
    manager = create_checkpoint_manager(config, mesh, None)
    assert config.global_batch_size_to_load % mesh.size == 0, "IndivisibleError"
    assert config.global_batch_size_to_load_eval % mesh.size == 0, "IndivisibleError"
    train, evaluation = input_pipeline_interface.create_data_iterator(config, mesh)
    ramp = create_rampup_manager(config, manager)
    loader = create_dataloader(config, mesh, train, None, ramp)
    return manager, train, evaluation, loader, ramp
""",
    "trainers/pre_train/train.py": """
import ast

import jax

from maxtext.common import checkpointing, metric_logger
from maxtext.configs import pyconfig
from maxtext.utils import train_utils

BATCHES = []
# Whether steps are saved as they are due, and not the last one alone.
SAVES_STEPS = False

def train_loop(config, step):
    p_train_step, _ = train_utils.jit_train_and_eval_step(config, None, None, step)
    logger = metric_logger.MetricLogger(
        config=config, learning_rate_schedule=None, start_step=step
    )
    return p_train_step, logger

def training_loop_iteration(config, checkpointer, train, load, step, p_step, logger):
    try:
        BATCHES.append(load())
    except Exception as error:
        print("Training stopped:", error)
        return False
    assert p_step(step - 1, BATCHES[-1])[0] == step
    if SAVES_STEPS:
        checkpointing.maybe_save_checkpoint(checkpointer, step, config, train, step)
    logger.buffer_and_write_metrics(5.0 - step / 8, step)
    return True

def main(argv):
    pairs = (argument.split("=", 1) for argument in argv[1:])
    keys = {{key: literal(value) for key, value in pairs}}
    config = pyconfig.initialize(keys)
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    checkpointer, train, evaluation, loader, ramp = train_utils.setup_train_loop(
        config, mesh
    )

    def load():
        return loader.load_next_batch(rampup_manager=ramp)

    step = 0
    if checkpointer.latest is not None:
        step = checkpointing.load_state_if_possible(checkpointer, train)
    BATCHES.clear()
    p_train_step, logger = train_loop(config, step)
    for step in range(step, config.steps):
        if not training_loop_iteration(
            config, checkpointer, train, load, step, p_train_step, logger
        ):
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

FIELDS = settings.DEFAULTS | {
    "colocated_python_data_input": False,
    "dataset_type": "synthetic",
    "enable_rampup_batch_size": False,
    "global_rampup_samples": 500,
    "per_device_batch_size_increment": 2.0,
    "grain_use_elastic_iterator": False,
    "steps": 3,
}


def install(directory: pathlib.Path, *, version="0.2.5", fields=FIELDS, **changes):
    """Writes the package; `changes` are texts of modules in which to replace others.

    Args:
      directory: to be put on the path of modules.
      version: that it reports.
      fields: its configuration's keys and defaults.
      changes: by the name of a module, a text and what to write in its place.
    """
    for name, text in MODULES.items():
        path = directory / "maxtext" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("{fields!r}", repr(fields))
        text = text.replace("{{", "{").replace("}}", "}")
        old, new = changes.get(path.stem, ("", ""))
        assert old in text
        path.write_text(text.replace(old, new) if old else text)
    info = directory / f"maxtext-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: maxtext\nVersion: {version}\n")


def forget():
    """Has Python import the package anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == "maxtext"]:
        del sys.modules[name]
    importlib.invalidate_caches()
