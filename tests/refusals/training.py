"""Configurations of runs that cannot be meant."""

import pathlib
from collections.abc import Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import host
from elastic_ckpt.training import callbacks, configured, launch, load, schema, step_log
from tests.refusals import Refusal, row


def in_file(text: str, says: str, overrides: Sequence[str] = ()) -> Refusal:
    """A mistake in the file `a.yml`, or in what overrides it."""

    def call(directory: pathlib.Path) -> None:
        (directory / "a.yml").write_text(text)
        load.load(directory / "a.yml", overrides)

    return Refusal(call, says, writes=True)


def setting(text: str, says: str) -> Refusal:
    """A mistake in the setting of one key."""
    return in_file(f"# why\n{text}\n", rf"a\.yml, line 2: {says}")


def override(text: str, says: str) -> Refusal:
    """A mistake on the command line."""
    return in_file("", says, [text])


def read(values):
    return load.from_values(values, place="here")


TIERS = {
    "run_name": "first",
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_directory": "/ram",
    "local_checkpoint_period": 5,
    "multi_tier_checkpointing_backup_interval_minutes": 20.0,
}
BACKUP_STEPS = "multi_tier_checkpointing_backup_interval_steps"


tiers = row(lambda **keys: configured.tiers(read(TIERS | keys), persistent="/steps"))
MACHINES = {
    **{"hosts": 4, "slices": 4, "global_batch_size": 24},
    **{"elastic_enabled": True, "elastic_machines": 2, "elastic_machine": 0},
}
machines = row(lambda **keys: launch.place(read(MACHINES | keys), {}))
# Hosts that the local launcher cannot start.
local = row(lambda **keys: configured.check_local(read(keys)))


def objects(config):
    """Callbacks that are none, for `training_callbacks`."""
    del config
    return {"mine": object()}


def called(says: str, function: str) -> Refusal:
    """A function that returns no callbacks."""
    section = schema.DivergenceSection(training_callbacks=function)
    config = schema.Config(divergence=section)
    return Refusal(lambda _: callbacks.configured(config), says)


def files(says: str, error: type[Exception], **keys: str) -> Refusal:
    """Files of texts that cannot be found or written."""

    def call(directory: pathlib.Path) -> None:
        named = {key: text.replace("DIR", str(directory)) for key, text in keys.items()}
        launch.with_files(read(named))

    return Refusal(call, says, error)


HEADER = (
    '{"version":1,"attempt":1,"start_step":0,"hosts":2,"slices":1,"devices":4,'
    '"data":{},"world":1,"left_out":[]}\n'
)
STEP = f'{{"step":0,"row":0,"digest":"{"00" * 16}",'


def read_log(directory: pathlib.Path, text: str) -> None:
    (directory / "step_log").mkdir()
    (directory / "step_log/attempt-00001.jsonl").write_text(text)
    step_log.read(directory)


# Files that are no step logs.
log = row(read_log, error=errors.DataError, writes=True)


REFUSALS = {
    "unknown key": setting(
        "chekpoint_period: 3", "unknown key 'chekpoint_period'; .*'checkpoint_period'"
    ),
    "unknown key on the command line": override(
        "host=2", "command line, 'host=2': unknown key 'host'; .*'hosts'"
    ),
    "override without a value": override("steps", "'steps': use the form key=value"),
    "text for an integer": setting(
        "steps: soon", "steps must be an integer, not 'soon'"
    ),
    "no steps": setting("steps: 0", "steps must be at least 1, not 0"),
    "number for a switch": setting(
        "enable_checkpointing: 1", "enable_checkpointing must be true or false, not 1"
    ),
    "number for a text": setting(
        "run_name: 7", 'run_name must be text, not 7; put it in quotes .run_name: "7"'
    ),
    "nan": setting("learning_rate: .nan", "learning_rate must be at least 0"),
    "unknown choice": setting(
        "hardware: fpga", 'hardware must be one of "cpu", "gpu", "tpu", not \'fpga\''
    ),
    "key that is set twice": in_file(
        "steps: 1\nhosts: 1\nsteps: 2\n", "line 3: steps is already set on line 1"
    ),
    "base that is missing": in_file(
        "base_config: none.yml",
        r"none\.yml: no such configuration file \(base_config of",
    ),
    "missing file": Refusal(
        lambda path: load.load(path / "none.yml"),
        "none.yml: no such configuration file",
    ),
    "tiers without a period": tiers(
        "local_checkpoint_period=0; set both", local_checkpoint_period=0
    ),
    "no backup interval": tiers(
        "set either .*_minutes or .*_steps as .*; neither is set",
        multi_tier_checkpointing_backup_interval_minutes=0.0,
    ),
    "two backup intervals": tiers(
        "set either .*_minutes or .*_steps as .*; both are", **{BACKUP_STEPS: 5}
    ),
    "best step without an evaluation": local(
        "save_best_checkpoint=true and .*=0 have no effect with eval_interval=0",
        save_best_checkpoint=True,
    ),
    "best steps among all": local(
        "max_num_checkpoints_to_keep=0, which keeps all steps",
        num_best_checkpoints_to_keep=2,
        eval_interval=5,
    ),
    "amount of memory": tiers(
        "local_checkpoint_size_limit='64 GB' is not an amount of memory",
        local_checkpoint_size_limit="64 GB",
    ),
    "amount of pinned memory": tiers(
        "local_checkpoint_pinned_memory='1 GB' is not an amount",
        local_checkpoint_pinned_memory="1 GB",
    ),
    "domain without a kind": tiers(
        "peer_domains='rack': 'rack' does not have the form `kind=name`",
        peer_domains="rack",
    ),
    "URL of an agent": tiers(
        r"peer_urls.* has '10\.0\.0\.1:1', which",
        peer_urls="http://10.0.0.2:1/v1/r;10.0.0.1:1",
    ),
    "machine without a number": machines(
        "the environment sets none of NODE_RANK", elastic_machine=-1
    ),
    "machine beyond the last": machines(
        "elastic_machine=2 is not the index of one of the 2", elastic_machine=2
    ),
    "slices that machines cannot share": machines(
        "cannot be divided evenly among 3 machines; .* of elastic_machines",
        elastic_machines=3,
    ),
    "machines of a run that is not elastic": machines(
        "needs elastic_enabled=true", elastic_enabled=False
    ),
    "hosts with TPUs of one machine": local(
        "hosts=4 with hardware=tpu: the local launcher", hosts=4, hardware="tpu"
    ),
    "slices of half a host": local(
        "a slice must consist of whole hosts", hosts=2, slices=4, elastic_enabled=True
    ),
    "fault of a slice that is not there": local(
        "kill_slice 1, but the run has slices 0 to 0; choose",
        elastic_enabled=True,
        faults='[{"kill_slice":1,"at_step":1}]',
    ),
    "faults without a supervisor": local(
        "nothing supervises the only host", faults='[{"kill_host":0,"at_step":1}]'
    ),
    "more slices needed than there are": local(
        "4 slices: the run trains on 5 to 4",
        **{"hosts": 4, "slices": 4, "elastic_enabled": True},
        elastic_min_slice_count=5,
    ),
    "RAM disk in a bucket": tiers(
        "not a directory on this", local_checkpoint_directory="gs://b/ram"
    ),
    "accelerator that is missing": Refusal(
        lambda _: host.check_hardware("gpu"),
        "hardware=gpu, but JAX finds only CPUs on .* set hardware=cpu",
        errors.RunError,
    ),
    "callback without methods": called(
        "'mine' is of type object, which lacks some of the methods after_step",
        f"{__name__}:objects",
    ),
    "callbacks without names": called(
        "of type type; it must return a dict", "builtins:type"
    ),
    "module of callbacks": called(
        "training_callbacks='no_such_module:make' cannot be imported",
        "no_such_module:make",
    ),
    "missing data": files(
        r"/nowhere/\*.array_record matches no files; check the path, or write a file",
        errors.DataError,
        grain_train_files="/nowhere/*.array_record",
    ),
    "texts as another format than their name": files(
        "set grain_file_type=parquet or rename",
        errors.ConfigError,
        grain_train_files="DIR/texts.parquet",
        text_directory="python-stdlib",
    ),
    "later step log": log("has version 2, but this program reads", '{"version":2}\n'),
    "batch of nothing": log("a batch of 0 rows", HEADER + STEP + '"rows":0}\n'),
    "batch beyond all memory": log(
        "a batch of 99999999999 rows", HEADER + STEP + '"rows":99999999999}\n'
    ),
    "step log without rows": log(
        "not a step log.*missing required field `rows`", HEADER + STEP[:-1] + "}\n"
    ),
    "digest of other bytes": log(
        "not a step log.*digest 00", HEADER + STEP.replace('"00', '"') + '"rows":9}\n'
    ),
    "directory without a step log": Refusal(
        step_log.read, "contains no step log; pass a run directory", errors.DataError
    ),
}
