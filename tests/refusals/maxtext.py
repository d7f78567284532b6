"""Mistakes in the keys of MaxText, and in the MaxText that is installed."""

import contextlib
import io

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext_hooks, maxtext_keys
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
    return Refusal(
        lambda _: maxtext_keys.divide(raw), f"^MaxText's configuration: .*{says}"
    )


def given(says, *more, **keys):
    """Arguments among which one is wrong."""
    arguments = [*more, *(f"{key}={value}" for key, value in keys.items())]
    return Refusal(
        lambda _: maxtext_keys.check(maxtext_keys.given(arguments), stand_in.FIELDS),
        f"^MaxText's configuration: .*{says}",
    )


def on_hosts(says, **keys):
    """Keys of a run on several hosts; one that is None is left out."""
    given = [f"{k}={v}" for k, v in {**HOSTS, **keys}.items() if v is not None]
    return Refusal(lambda _: maxtext_keys.supervised(maxtext_keys.given(given)), says)


def installed(says, **change):
    """A MaxText in which something that we take of it has moved."""

    def check(directory):
        with stand_in.installed(directory, version="0.9", **change):
            maxtext_hooks.check_installed()

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
        maxtext_hooks.check_installed()


# MaxText is imported after the keys and the files were checked.
IMPORTED = {"train": ("import ast", "raise AssertionError('it takes long')")}
REFUSALS = {
    "no MaxText": Refusal(
        lambda _: maxtext_hooks.keys(),
        "^MaxText is not installed next to elastic_ckpt; .*guides/maxtext.md",
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
    "MaxText without a module": Refusal(
        without_a_module, "has no .*rampup_batch.RampupBatchManager", writes=True
    ),
    "misspelt key of a run": run(
        "unknown key 'grain_tran_files'.*grain_train_files",
        change=IMPORTED,
        grain_tran_files="x",
    ),
    "no logical shards": divided(
        "num_logical_shards is not set; choose it once .*plan", num_logical_shards=0
    ),
    "elastic without hosts": divided(
        "elastic_enabled=true without hosts is not .*; set hosts", elastic_enabled=True
    ),
    "files that are not there": run(
        "grain_train_files: /absent/.* matches no files",
        code=1,
        change=IMPORTED,
        grain_train_files="/absent/*",
    ),
    "a small vocabulary": run(
        "vocab_size=258 with a tokenizer of 259 tokens .*; set .* 259", vocab_size=258
    ),
    "a RAM directory that cannot be made": run(
        "/proc/x.* cannot be created .*local_checkpoint_directory",
        code=1,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory="/proc/x",
        local_checkpoint_period=100,
        multi_tier_checkpointing_backup_interval_steps=2,
    ),
    "hosts without a name": on_hosts("hosts=2 requires run_name", run_name=None),
    "hosts without a batch": on_hosts(
        "hosts=2 requires per_device_batch_size", per_device_batch_size=None
    ),
    "hosts that accumulate": on_hosts(
        "gradient_accumulation_steps with hosts=2 is not supported; omit it; while",
        gradient_accumulation_steps=2,
    ),
    "hosts with a ramp": on_hosts(
        "enable_rampup_batch_size with elastic_enabled and hosts=2 is .*; during the",
        enable_rampup_batch_size="true",
        elastic_enabled="true",
    ),
    "a number of hosts in words": on_hosts(
        "hosts must be an integer, not 'two'", hosts="two"
    ),
    "another pipeline": divided(
        "dataset_type=hf is .*; omit it, and set grain_train_files", dataset_type="hf"
    ),
    "misspelt key of MaxText": given("'pack': .* did you mean 'packing'", pack=1),
    "misspelt key of ours": given(
        "'peer_copie': .* did you mean 'peer_copies'", peer_copie=1
    ),
    "a base given as a key": given(
        "base_config=post_train/sft.yml is .*; pass the file as the first argument",
        base_config="post_train/sft.yml",
    ),
    "part of a row for a device": given(
        "size=0.5 is not .*; set it to an integer", per_device_batch_size=0.5
    ),
    **{
        f"{key} of MaxText": given(f"{key}=(2|True) is .*; .{{20}}", **{key: value})
        for key, value in {
            **dict.fromkeys(maxtext_keys._REFUSED, True),
            "expansion_factor_real_data": 2,
        }.items()
    },
}
