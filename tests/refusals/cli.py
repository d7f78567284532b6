"""Commands that cannot be meant."""

import functools
import json
import pathlib
import sys
from unittest import mock

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.inspect import page, run_files
from elastic_ckpt.simulation import failures
from elastic_ckpt.training import configured, load
from tests import runs
from tests.refusals import Refusal, row


@functools.cache
def parser():
    return main.build_parser()


def verb(says: str, *arguments: object, error=errors.ConfigError) -> Refusal:
    """A command line, in which DIR is the directory of the row."""

    def call(directory: pathlib.Path) -> None:
        words = [str(word).replace("DIR", str(directory)) for word in arguments]
        parsed = parser().parse_args(words)
        parsed.execute(parsed)

    return Refusal(call, says, error)


failing = functools.partial(verb, error=errors.ElasticCkptError)


def on_files(refusal: Refusal, **files: str) -> Refusal:
    """The same, in a directory with these files."""

    def call(directory: pathlib.Path) -> None:
        for name, content in files.items():
            (directory / name).write_text(content)
        refusal.call(directory)

    return refusal._replace(call=call, writes=True)


def train(says: str, **settings: object) -> Refusal:
    """The configuration of a run that is not started."""

    def call(directory: pathlib.Path) -> None:
        config = runs.write_config(directory, "texts", **settings)
        parsed = parser().parse_args(["train", str(config)])
        configured.check_local(load.load(config))
        parsed.execute(parsed)

    return Refusal(call, says, writes=True)


FOUR = {"hosts": 4, "slices": 4, "global_batch_size": 12, "elastic_enabled": True}


def scale(says: str, slices: int, *, error=errors.ConfigError, **settings) -> Refusal:
    """A request for slices of a run that has ended."""

    def call(directory: pathlib.Path) -> None:
        config = runs.write_config(directory, "texts", **{**FOUR, **settings})
        runs.write_record(directory, load.load(config))
        ended = {"time": 0.0, "event": "run_finished", "step": 1, "secs": 1.0}
        (directory / run_files.EVENTS).write_text(json.dumps(ended) + "\n")
        verb("", "scale", directory, "--slices", slices).call(directory)

    return Refusal(call, says, error, writes=True)


CLUSTER = [
    *("simulate", "configs/demo_cpu.yml", "global_batch_size=0"),
    *("per_device_batch_size=3", "num_logical_shards=1680", "hosts=16", "slices=8"),
    *("--state-gib", "1", "--days", "0.5", "--cost", "step_secs=10"),
    *("--machine-hours", "12"),
]


# The events of a run that is simulated on four slices of two hosts.
trace = row(lambda *log: failures.of_log(log, slices=4, hosts_per_slice=2))
SECRET = ["--secret-file", "DIR/secret"]
REFUSALS = {
    "run without a name": train("run_name is empty; set it", run_name=""),
    "batch that hosts cannot share": train(
        "a global batch of 8 rows cannot be divided evenly among 3 devices, as JAX",
        hosts=3,
    ),
    "elastic run without checkpoints": train(
        "elastic_enabled=true with enable_checkpointing=false",
        **{"elastic_enabled": True, "enable_checkpointing": False},
        **{"hosts": 2, "slices": 2},
    ),
    "Azure container for a run": failing(
        "az://container/runs.*can only hold training data",
        *("inspect", "az://container/runs/tiny"),
    ),
    "texts in a bucket": verb(
        "gs://bucket/texts: this machine has no text files under this path",
        *("data", "gs://bucket/texts", "out"),
        error=errors.DataError,
    ),
    "texts as TFRecord": verb(
        "text cannot be written as tfrecord; set grain_file_type to one of arrayrecord",
        *("data", "DIR", "texts.tfrecord"),
    ),
    "audit of no run": failing("is not a run directory", "audit", "DIR"),
    "inspection of nothing": failing(
        "neither a run directory .* nor a directory with steps", "inspect", "DIR"
    ),
    "verification of a missing directory": failing(
        "none: no such directory; specify", "verify", "DIR/none"
    ),
    "RAM of machines that are not recorded": on_files(
        verb(
            "no agents of the run's machines are recorded there",
            *("verify", "DIR", *SECRET),
            error=errors.CheckpointError,
        ),
        secret="long-enough-for-a-secret",
    ),
    "agent of a missing directory": failing(
        "none cannot be served at .* pass the existing directory of a run",
        *("agent", "DIR/none"),
    ),
    "agent with a short secret": on_files(
        failing(
            "secret is missing or does not contain a secret", "agent", "DIR", *SECRET
        ),
        secret="too short",
    ),
    "domains of an agent of no node": failing(
        "--domains, .* apply only to a node's agent; add --node",
        *("agent", "DIR", "--domains", "rack=r7"),
    ),
    "pin of no step": failing("is not a step directory", "pin", "DIR"),
    "slices of a run that is not elastic": scale(
        "was not started with elastic_enabled=true",
        2,
        error=errors.RunError,
        elastic_enabled=False,
    ),
    "too many slices": scale("5 slices: the run trains on 4 to 4 ", 5),
    "slices that cannot share the batch": scale(
        "16 rows cannot be split over the 3 devices of a 3-slice world",
        3,
        elastic_min_slice_count=2,
        global_batch_size=16,
    ),
    "slices of a run that has ended": scale(
        "is not running; start it", 3, error=errors.RunError, elastic_min_slice_count=2
    ),
    "cost without a name": verb(
        "--cost days=1: the value must be above 0, and the name",
        *(*CLUSTER, "--cost", "days=1"),
    ),
    "cost of nothing": verb(
        "step_secs=0: the value must be above 0", *CLUSTER, "--cost", "step_secs=0"
    ),
    "failures of no run": failing(
        "nowhere is not a run directory", *CLUSTER, "--trace", "nowhere"
    ),
    "plots without their extra": Refusal(
        lambda _: mock.patch.dict(sys.modules, vl_convert=None)(page.library)(),
        r"vl-convert .*'\.\[report\]'",
    ),
    "slice that is not there": trace(
        "slice_lost event for slice 4, but the .* only slices 0 to 3",
        {"time": 1, "event": "slice_lost", "slice": 4},
    ),
    "host that is not there": trace(
        "host_lost event for host 40", {"time": 0, "event": "host_lost", "host": 40}
    ),
}
