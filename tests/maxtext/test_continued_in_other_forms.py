"""Checkpoints of real MaxText, with optimizer, in other forms of its layers.

MaxText trains with scanned layers; `elastic-ckpt convert` makes of a checkpoint what
MaxText, in another form, loads and goes on from; and that is converted back.
"""

import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.cli import main
from tests.maxtext import environment
from tests.maxtext.test_real_maxtext import MODEL
from tests.universal.formats.stored_values import read
from tests.universal.rules.relayout import assert_same

pytestmark = pytest.mark.night

# The checkpoint that is converted, and the step after the last.
STEP, STEPS = 2, 5
GLOBAL_ROWS = 4
STAGES = {
    "ici_pipeline_parallelism": 2,
    "num_layers_per_pipeline_stage": 2,
    "num_pipeline_microbatches": 2,
}
# By layout: the settings of MaxText, and its hosts.
FORMS = {
    "maxtext_unscanned_to_scanned": ({"scan_layers": False}, 1),
    "maxtext_circular_to_scanned": ({**STAGES, "num_layers_per_pipeline_stage": 1}, 2),
}


class Runs:
    """Runs of MaxText on data that it makes up."""

    def __init__(self, hosts, directory):
        self._hosts = hosts
        self.directory = directory

    def run(self, name, num_hosts=1, **settings):
        """The losses of a run, by step."""
        keys = {
            **MODEL,
            "base_num_decoder_layers": 4,
            "dataset_type": "synthetic",
            "checkpoint_period": 1,
            "warmup_steps_fraction": 0,
            "per_device_batch_size": GLOBAL_ROWS // num_hosts,
            "steps": STEPS,
            "run_name": name,
            "base_output_directory": self.directory / "runs",
            "jax_cache_dir": self.directory / "jax_cache",
            **settings,
        }
        logs = self.directory / "logs" / name
        codes = self._hosts.run(
            program="stock",
            num_hosts=num_hosts,
            directory=logs,
            arguments=[f"{key}={value}" for key, value in keys.items()],
        )
        assert codes == [0] * num_hosts, (logs / "0.log").read_text()[-5000:]
        losses = environment.losses(logs)["train"]
        return {step: float(loss) for step, (_, loss, _) in losses.items()}

    def checkpoint(self, name, step):
        return self.directory / "runs" / name / "checkpoints" / str(step) / "items"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    environment.set_up()
    directory = tmp_path_factory.mktemp("forms")
    hosts = environment.Hosts(directory)
    yield Runs(hosts, directory)
    hosts.close()


@pytest.fixture(scope="module")
def scanned(runs):
    """The losses of the run with scanned layers."""
    return runs.run("scanned")


def convert(source, step, layout, *options):
    arguments = [source, step, "--rules", layout, *options]
    assert main.main(["convert", *map(str, arguments)]) == 0


def arrays(path):
    opened = universal.open_checkpoint(path)
    return {tensor.name: read(tensor) for tensor in opened.tensors}


def is_state(name):
    """Whether it is a state of a run in any form, and no random number."""
    return not name.startswith("nnx_aux/")


@pytest.mark.parametrize("layout", list(FORMS))
def test_a_run_goes_on_from_a_checkpoint_in_another_form(runs, scanned, layout):
    settings, num_hosts = FORMS[layout]
    source = runs.checkpoint("scanned", STEP)
    directory = runs.directory / "converted" / layout
    sizes = ["--size", "stage=2"] if num_hosts == 2 else []
    convert(source, directory / "there" / "0", layout, "--reverse", *sizes)
    converted = directory / "there" / "0" / "items"
    settings = {**settings, "load_full_state_path": converted}
    losses = runs.run(layout, num_hosts, **settings)
    assert losses == pytest.approx(
        {step: scanned[step] for step in range(STEP + 1, STEPS)}, rel=1e-3
    )
    convert(converted, directory / "back" / "0", layout)
    made, expected = arrays(directory / "back" / "0"), arrays(source)
    assert_same(made, {name: expected[name] for name in expected.keys() & made.keys()})
    assert {name for name in expected if is_state(name)} <= made.keys()
    convert(runs.checkpoint(layout, STEPS - 1), directory / "last" / "0", layout)
    made = arrays(directory / "last" / "0")
    for name, array in arrays(runs.checkpoint("scanned", STEPS - 1)).items():
        if is_state(name):
            np.testing.assert_allclose(made[name], array, 1e-3, 1e-6, err_msg=name)
