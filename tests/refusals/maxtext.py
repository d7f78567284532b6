"""Mistakes in the keys of MaxText, and in the MaxText that is installed."""

import contextlib
import io

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext_config, maxtext_elastic, maxtext_seam
from tests.integrations import stand_in
from tests.refusals import Refusal

HOSTS = {
    "hosts": 2,
    "run_name": "a",
    "base_output_directory": "/runs",
    "per_device_batch_size": 6,
}


def divided(says, **keys):
    """Keys of MaxText and of ours, among which one is wrong."""
    raw = {"num_logical_shards": 12, **keys}
    known = {*stand_in.FIELDS, *keys} - {"pack", "peer_copie", "num_logical_shard"}
    return Refusal(
        lambda _: maxtext_config.divide(raw, known=known, explicit=set(keys)),
        f"^MaxText's configuration: .*{says}",
    )


def trained(says, **keys):
    """A configuration that MaxText has checked, of whose data a key is wrong."""
    own = maxtext_config.Own(values={"num_logical_shards": 48})
    config = stand_in.config(**keys)
    return Refusal(
        lambda _: maxtext_config.train_section(config, own),
        f"^MaxText's configuration: {says}",
    )


def rows(says, *, evaluation=False, **keys):
    """A batch that the devices cannot share."""
    return Refusal(
        lambda _: maxtext_config.global_batch_size(
            stand_in.config(**keys), num_devices=8, evaluation=evaluation
        ),
        f"^MaxText's configuration: {says}",
    )


def on_hosts(says, **keys):
    """Keys of a run on several hosts; one that is None is left out."""
    given = [f"{k}={v}" for k, v in {**HOSTS, **keys}.items() if v is not None]
    return Refusal(lambda _: maxtext_elastic.run_config(given), says)


def installed(says, **change):
    """A MaxText in which something that we take of it has moved."""

    def check(directory):
        with stand_in.installed(directory, version="0.9", **change):
            maxtext_seam.check_installed()

    return Refusal(
        check,
        f"^MaxText 0.9 {says}: elastic_ckpt supports MaxText 0.2.5; install",
        writes=True,
    )


def run(says, *, code=errors.CONFIG_EXIT_CODE, change=None, **keys):
    """A whole run of the stand-in, whose only line is the refusal."""

    def start(directory):
        stand_in.write_texts(directory)
        given = stand_in.arguments(directory, directory, **keys)
        complaint = io.StringIO()
        with (
            stand_in.installed(directory, **(change or {})),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(complaint),
        ):
            assert main.main(["maxtext", *given]) == code
        raise errors.ElasticCkptError(complaint.getvalue().rstrip("\n"))

    says = f"^elastic-ckpt maxtext: .*{says}"
    return Refusal(start, says, errors.ElasticCkptError, writes=True)


def without_a_module(directory):
    with stand_in.installed(directory):
        (directory / "maxtext" / "utils" / "rampup_batch.py").unlink()
        train = directory / "maxtext" / "trainers" / "pre_train" / "train.py"
        train.write_text("def main(argv): pass")
        maxtext_seam.check_installed()


def weights_of_hugging_face(directory):
    (directory / "model-00001-of-00002.safetensors").touch()
    maxtext_config.check_weights({"load_parameters_path": str(directory)})


# MaxText is imported after the keys and the files were checked.
IMPORTED = {"train": ("import ast", "raise AssertionError('it takes long')")}
WITHOUT_SOME_KEYS = {
    key: value
    for key, value in stand_in.FIELDS.items()
    if key not in ("packing", "use_sft")
}
HUB = "hf://datasets/allenai/c4/**/*{}*.parquet".replace("*", r"\*")
EVAL = {"grain_train_mixture_config_path": "m.json", "eval_interval": 5}

REFUSALS = {
    "no MaxText": Refusal(
        lambda _: maxtext_seam.check_installed(),
        "^MaxText is not installed beside elastic_ckpt; .*guides/maxtext.md",
    ),
    "MaxText without main": installed(
        "has no maxtext.trainers.pre_train.train.main",
        train=("def main(argv)", "def run(argv)"),
    ),
    "MaxText with other arguments": installed(
        ".*create_data_iterator with config, devices instead of config, mesh",
        input_pipeline_interface=("(config, mesh)", "(config, devices)"),
    ),
    "MaxText that does not call": installed(
        "does not call _prepare_for_pydantic in .*_initialize_pydantic",
        pyconfig=("raw_keys = _prepare_for_pydantic(", "raw_keys = dict("),
    ),
    "MaxText without a caller": installed(
        "does not call PlaceHolderDataIterator in .*load_state_if_possible",
        checkpointing=("def load_state_if_possible(", "def load_state("),
    ),
    "MaxText without keys": installed(
        "has no key packing, use_sft", fields=WITHOUT_SOME_KEYS
    ),
    "MaxText without a module": Refusal(
        without_a_module, "has no .*rampup_batch.RampupBatchManager", writes=True
    ),
    "misspelt key of MaxText": divided("'pack', .* did you mean 'packing'", pack=1),
    "misspelt key of ours": divided(
        "'peer_copie', .* did you mean 'peer_copies'", peer_copie=1
    ),
    "misspelt key of a run": run(
        "unknown key 'grain_tran_files'.*grain_train_files",
        change=IMPORTED,
        grain_tran_files="x",
    ),
    "no logical shards": divided(
        "num_logical_shards is not set; choose it once .*plan", num_logical_shards=0
    ),
    "shards of a wrong type": divided(
        "num_logical_shards must be a whole number, not 'many'",
        num_logical_shards="many",
    ),
    "key of the tiers": divided("peer_copies must be at least 0", peer_copies=-2),
    "generated data": divided("data that MaxText generates", dataset_type="synthetic"),
    "another pipeline": divided(
        "=olmo_grain can only be read by MaxText itself; set it to grain, and"
        " grain_train_files to ArrayRecord",
        dataset_type="olmo_grain",
    ),
    "pipeline of Hugging Face": divided(
        f"grain_file_type to parquet, and grain_train_files to {HUB.format('train')}",
        dataset_type="hf",
        hf_path="allenai/c4",
    ),
    "Parquet files of Hugging Face": divided(
        "grain_train_files to /data/c4/",
        dataset_type="hf",
        hf_path="parquet",
        hf_train_files="/data/c4/*.parquet",
    ),
    "JSON files of Hugging Face": divided(
        "grain_train_files to ArrayRecord",
        dataset_type="hf",
        hf_path="json",
        hf_train_files="/d/*.json",
    ),
    "pipeline of TensorFlow Datasets": divided(
        "to tfrecord, and .* to gs://data/c4/en/3.1.0/.*-train2.tfrecord-",
        dataset_type="tfds",
        dataset_path="gs://data/",
        dataset_name="c4/en:3.1.0",
        train_split="train2",
    ),
    "elastic without hosts": divided(
        "elastic_enabled=true without hosts: set hosts and slices", elastic_enabled=True
    ),
    "key that follows from others": run(
        "global_batch_size has no effect: .* is per_device_batch_size times",
        global_batch_size=16,
    ),
    "a relative directory": trained(
        "base_output_directory=runs: .* give /.*/runs$", base_output_directory="runs"
    ),
    "no files": trained(
        "grain_train_files is empty; set it to the files", grain_train_files=""
    ),
    "files of the hub": trained(
        f"grain_train_files is empty; set it to {HUB.format('train')}, where MaxText",
        grain_train_files="",
        grain_file_type="parquet",
        hf_path="hf://datasets/allenai/c4",
    ),
    "evaluation files of the hub": trained(
        f"grain_eval_files is empty; set it to {HUB.format('validation')}, where",
        grain_file_type="parquet",
        hf_path="allenai/c4",
        **EVAL,
    ),
    "evaluation files of TensorFlow": trained(
        "grain_eval_files is empty; set it to /data/c4/en/3.1.0/.*-validation.tfrec",
        grain_file_type="tfrecord",
        dataset_path="/data",
        **EVAL,
    ),
    "files that are not there": run(
        "grain_train_files: /absent/.* matches no file",
        code=1,
        change=IMPORTED,
        grain_train_files="/absent/*",
    ),
    "several columns": trained(
        "train_data_columns=.*: text is in one column", train_data_columns=["a", "b"]
    ),
    "files that are not read": trained(
        "grain_file_type must be one of .*not 'mmap'", grain_file_type="mmap"
    ),
    "tokenizer of the hub": trained(
        "tokenizer_path=org/model is not on this machine; download",
        tokenizer_type="huggingface",
        tokenizer_path="org/model",
    ),
    "part of a row for a device": rows(
        "per_device_batch_size=0.5 makes MaxText load", per_device_batch_size=0.5
    ),
    "part of a row of an evaluation": rows(
        "eval_per_device_batch_size=0.5 makes MaxText load",
        evaluation=True,
        eval_per_device_batch_size=0.5,
    ),
    # MaxText shards its batch over the devices before it asks for the data.
    "a batch that cannot be shared": run(
        "per_device_batch_size=1.5 makes a global batch of 12 rows, which cannot",
        per_device_batch_size=1.5,
    ),
    "an evaluation's that cannot be shared": run(
        "eval_per_device_batch_size=1.5 makes a global batch of 12 rows",
        eval_interval=1,
        eval_per_device_batch_size=1.5,
    ),
    "a small vocabulary": run(
        "vocab_size=258, but the tokenizer has 259 tokens; set .* 259", vocab_size=258
    ),
    "two intervals of backups": run(
        "not both: it is the interval between backups",
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory="/dev/shm",
        local_checkpoint_period=100,
        multi_tier_checkpointing_backup_interval_steps=100,
        multi_tier_checkpointing_backup_interval_minutes=3,
    ),
    "a RAM directory that cannot be made": run(
        "/proc/x.* cannot be made .*local_checkpoint_directory",
        code=1,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory="/proc/x",
        local_checkpoint_period=100,
        multi_tier_checkpointing_backup_interval_steps=2,
    ),
    "weights of Hugging Face": Refusal(
        weights_of_hugging_face,
        "these are Hugging Face weights; run `elastic-ckpt convert",
        writes=True,
    ),
    "hosts without a name": on_hosts("hosts=2 needs run_name", run_name=None),
    "hosts without a batch": on_hosts(
        "hosts=2 needs per_device_batch_size", per_device_batch_size=None
    ),
    "hosts that accumulate": on_hosts(
        "gradient_accumulation_steps=2 with hosts=2: leave it out; fewer",
        gradient_accumulation_steps=2,
    ),
    "hosts with half a row": on_hosts(
        "per_device_batch_size=6.5 makes a global batch of 13 rows, which cannot",
        per_device_batch_size=6.5,
    ),
    "hosts with a ramp": on_hosts(
        "enable_rampup_batch_size=true with hosts=2 and elastic_enabled=true: few",
        enable_rampup_batch_size="true",
        elastic_enabled="true",
    ),
    "a number of hosts in words": on_hosts(
        "hosts must be a whole number, not 'two'", hosts="two"
    ),
    **{
        f"{key} of MaxText": trained(
            f"{key}={2.0 if accepted == -1 else True}: .{{20}}",
            **{key: 2.0 if accepted == -1 else True},
        )
        for key, accepted in maxtext_config._ACCEPTED.items()
    },
}
