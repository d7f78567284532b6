import dataclasses
import json
import os
import re
import sys
import types

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import data_keys
from elastic_ckpt.integrations import maxtext_config
from elastic_ckpt.training import schema

# The keys of MaxText's base.yml that are read, and files.
DEFAULTS = {
    "async_checkpointing": True,
    "checkpoint_dir": "",
    "dataset_name": "c4/en:3.1.0",
    "dataset_path": "",
    "eval_dataset_name": "c4/en:3.1.0",
    "eval_split": "validation",
    "hf_eval_files": "",
    "hf_eval_split": "",
    "hf_path": "",
    "hf_train_files": "",
    "enable_single_controller": False,
    "train_split": "train",
    "elastic_enabled": False,
    "elastic_max_retries": 10,
    "elastic_min_slice_count": -1,
    "elastic_timeout_seconds": 300,
    "enable_checkpointing": True,
    "enable_continuous_checkpointing": False,
    "add_bos": True,
    "add_eos": True,
    "data_shuffle_seed": 0,
    "enable_data_shuffling": True,
    "eval_data_columns": ["text"],
    "eval_interval": -1,
    "eval_steps": -1,
    "expansion_factor_real_data": -1.0,
    "generate_padding_batch_eval": False,
    "generate_padding_batch_train": False,
    "enable_emergency_checkpoint": False,
    "enable_multi_tier_checkpointing": False,
    "local_checkpoint_directory": "",
    "local_checkpoint_period": 0,
    "max_num_checkpoints_to_keep": None,
    "multi_tier_checkpointing_backup_interval_minutes": None,
    "multi_tier_checkpointing_backup_interval_steps": None,
    "base_output_directory": "",
    "checkpoint_period": 4,
    "num_slices": 1,
    "run_name": "first",
    "save_checkpoint_on_completion": True,
    "steps": 3,
    "eval_per_device_batch_size": 12.0,
    "global_batch_size_to_load": 48,
    "global_batch_size_to_load_eval": 24,
    "grain_eval_files": "",
    "grain_file_type": "arrayrecord",
    "grain_packing_type": "first_fit",
    "grain_per_worker_buffer_size": 1,
    "grain_shuffle_buffer_size": 100,
    "grain_train_files": "/data/a*",
    "grain_train_mixture_config_path": "",
    "grain_worker_count": 1,
    "max_segments_per_seq": -1,
    "max_target_length": 2048,
    "num_epoch": 1,
    "packing": True,
    "per_device_batch_size": 12.0,
    "tokenize_eval_data": True,
    "tokenize_train_data": True,
    "tokenizer_path": "/models/llama2",
    "tokenizer_type": "sentencepiece",
    "train_data_columns": ["text"],
    "use_dpo": False,
    "use_multimodal": False,
    "chat_template": "",
    "chat_template_path": "",
    "formatting_func_path": "",
    "sft_train_on_completion_only": False,
    "use_sft": False,
    "use_truncation": True,
    "vocab_size": 32000,
}
OWN = maxtext_config.Own(values={"num_logical_shards": 48})


def config(**settings):
    return types.SimpleNamespace(**{**DEFAULTS, **settings})


def refused(match):
    return pytest.raises(errors.ConfigError, match=match)


def test_a_relative_directory_is_refused_before_the_first_save():
    with refused(r"base_output_directory=runs: .* give /.*/runs$"):
        maxtext_config.train_section(config(base_output_directory="runs"), OWN)
    for directory in ("/runs", "gs://bucket/runs", ""):
        settings = {"base_output_directory": directory}
        assert maxtext_config.train_section(config(**settings), OWN)


def test_the_keys_that_are_read_are_those_of_the_stand_in_and_of_maxtext():
    assert set(maxtext_config.MAXTEXT_KEYS) == DEFAULTS.keys()


def test_our_keys_are_taken_out_of_what_maxtext_sees():
    raw = {
        "steps": 5,
        "num_logical_shards": 12,
        "drop_remainder": True,
        "corrupt_records": "skip",
        "grain_record_format": "bytes",
        "tokenizer_type": "bytes",
    }
    before = dict(raw)
    theirs, own = maxtext_config.divide(raw)
    assert theirs == {
        "steps": 5,
        "dataset_type": "grain",
        "grain_use_elastic_iterator": False,
        "colocated_python_data_input": False,
    }
    assert own.values == {key: before[key] for key in before if key != "steps"}
    assert not own.in_sidecar
    # An elastic event has MaxText read its configuration again.
    assert raw == before
    assert maxtext_config.divide(raw) == (theirs, own)


def test_a_tokenizer_that_maxtext_knows_stays_with_it():
    raw = {"num_logical_shards": 12, "tokenizer_type": "tiktoken"}
    theirs, own = maxtext_config.divide(raw)
    assert theirs["tokenizer_type"] == "tiktoken"
    assert own.values == {"num_logical_shards": 12, "grain_record_format": "tf_example"}


def test_flags_of_maxtext_whose_checks_refuse_what_is_possible_here_are_off_for_it():
    theirs, own = maxtext_config.divide(
        {
            "num_logical_shards": 12,
            "grain_use_elastic_iterator": True,
            "colocated_python_data_input": True,
        }
    )
    assert not theirs["grain_use_elastic_iterator"]
    assert not theirs["colocated_python_data_input"]
    assert own.in_sidecar


@pytest.mark.parametrize("dataset_type", ["synthetic", "grain"])
def test_the_data_is_ours_if_nothing_else_was_asked_for(dataset_type):
    theirs, _ = maxtext_config.divide(
        {"num_logical_shards": 12, "dataset_type": dataset_type}
    )
    assert theirs["dataset_type"] == "grain"


@pytest.mark.parametrize("dataset_type", ["tfds", "hf", "c4_mlperf", "olmo_grain"])
def test_another_pipeline_of_maxtext_is_refused(dataset_type):
    with refused(
        rf"dataset_type={dataset_type} can only be read by MaxText itself; set it to"
    ):
        maxtext_config.divide({"num_logical_shards": 1, "dataset_type": dataset_type})


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"dataset_type": "hf", "hf_path": "allenai/c4"},
            "grain, grain_file_type to parquet, and grain_train_files to"
            " hf://datasets/allenai/c4/**/*train*.parquet",
        ),
        (
            {
                "dataset_type": "tfds",
                "dataset_path": "gs://data/",
                "dataset_name": "c4/en:3.1.0",
                "train_split": "train2",
            },
            "grain, grain_file_type to tfrecord, and grain_train_files to"
            " gs://data/c4/en/3.1.0/*-train2.tfrecord-*",
        ),
    ],
)
def test_another_pipeline_s_files_are_named_as_what_to_set(settings, remedy):
    with refused(re.escape(f"can only be read by MaxText itself; set it to {remedy}")):
        maxtext_config.divide({"num_logical_shards": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "grain_train_files is empty; set it to the files"),
        (
            {"grain_file_type": "parquet", "hf_path": "hf://datasets/allenai/c4"},
            "grain_train_files is empty; set it to"
            " hf://datasets/allenai/c4/**/*train*.parquet, where MaxText would look",
        ),
        (
            {"grain_file_type": "tfrecord", "dataset_path": "/data"},
            "grain_train_files is empty; set it to"
            " /data/c4/en/3.1.0/*-train.tfrecord-*, where MaxText would look",
        ),
        (
            {
                "grain_file_type": "parquet",
                "grain_train_mixture_config_path": "m.json",
                "eval_interval": 5,
                "hf_path": "allenai/c4",
            },
            "grain_eval_files is empty; set it to"
            " hf://datasets/allenai/c4/**/*validation*.parquet, where MaxText",
        ),
        (
            {
                "grain_file_type": "tfrecord",
                "grain_train_mixture_config_path": "m.json",
                "eval_interval": 5,
                "dataset_path": "/data",
            },
            "grain_eval_files is empty; set it to"
            " /data/c4/en/3.1.0/*-validation.tfrecord-*, where MaxText would look",
        ),
    ],
)
def test_files_that_maxtext_would_derive_are_named_as_what_to_set(settings, message):
    with refused(re.escape(f"MaxText's configuration: {message}")):
        maxtext_config.train_section(config(grain_train_files="", **settings), OWN)


@pytest.mark.parametrize("raw", [{}, {"num_logical_shards": 0}])
def test_the_logical_shards_have_to_be_chosen(raw):
    with refused("num_logical_shards is not set; choose it once .*elastic-ckpt plan"):
        maxtext_config.divide(raw)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_logical_shards", "many", "must be a whole number, not 'many'"),
        ("num_logical_shards", -3, "must be at least 0, not -3"),
        ("drop_remainder", 1, "must be true or false, not 1"),
        ("corrupt_records", "keep", 'must be one of "fail", "skip", not'),
        ("grain_record_format", "json", 'must be one of "bytes", "tf_example", not'),
        ("colocated_python_data_input", "on", "must be true or false, not 'on'"),
    ],
)
def test_values_of_our_keys_are_checked_like_anywhere(key, value, message):
    with refused(f"^MaxText's configuration: {key} {message}"):
        maxtext_config.divide({"num_logical_shards": 12, key: value})


def test_maxtext_s_defaults_mean_the_same_here():
    assert maxtext_config.train_section(config(), OWN) == data_keys.DataKeys(
        grain_train_files="/data/a*",
        num_logical_shards=48,
        num_epoch=1,
        tokenizer_type="sentencepiece",
        tokenizer_path="/models/llama2",
        max_target_length=2048,
        packing=True,
        grain_worker_count=1,
    )


def test_every_setting_that_both_have_is_taken_over():
    own = maxtext_config.Own(
        values={
            "num_logical_shards": 48,
            "grain_record_format": "tf_example",
            "corrupt_records": "skip",
            "drop_remainder": True,
            "tokenizer_type": "bytes",
        },
        in_sidecar=True,
    )
    settings = {
        "add_bos": False,
        "add_eos": False,
        "data_shuffle_seed": 7,
        "enable_data_shuffling": False,
        "eval_interval": 10,
        "eval_steps": 3,
        "grain_eval_files": "/data/e",
        "grain_file_type": "parquet",
        "grain_packing_type": "best_fit",
        "grain_per_worker_buffer_size": 4,
        "grain_shuffle_buffer_size": 9,
        "grain_train_mixture_config_path": "/data/mixture.json",
        "max_segments_per_seq": 5,
        "max_target_length": 64,
        "num_epoch": 2,
        "use_truncation": False,
    }
    made = maxtext_config.train_section(
        config(train_data_columns=["body"], grain_worker_count=-1, **settings), own
    )
    assert made == data_keys.DataKeys(
        grain_train_files="/data/a*",
        train_data_columns="body",
        colocated_python_data_input=True,
        packing=True,
        **settings,
        **own.values,
    )


def test_fine_tuning_takes_the_columns_and_the_template_of_conversations():
    settings = {
        "use_sft": True,
        "sft_train_on_completion_only": True,
        "train_data_columns": ["prompt", "completion"],
        "eval_data_columns": ["question", "answer"],
        "chat_template_path": "/models/chat.jinja",
    }
    own = dataclasses.replace(
        OWN, values={**OWN.values, "chat_template_date": "2026-01-01"}
    )
    made = maxtext_config.train_section(config(**settings), own)
    assert made.use_sft
    assert made.sft_train_on_completion_only
    assert made.train_data_columns == "prompt,completion"
    assert made.chat_template_path == "/models/chat.jinja"
    assert made.chat_template_date == "2026-01-01"
    of_eval = maxtext_config.eval_section(config(**settings), own)
    assert of_eval.train_data_columns == "question,answer"


def test_evaluation_has_columns_and_tokens_of_its_own():
    settings = {"eval_data_columns": ["held"], "tokenize_eval_data": False}
    made = maxtext_config.eval_section(config(**settings), OWN)
    assert (made.train_data_columns, made.tokenize_train_data) == ("held", False)
    of_training = maxtext_config.train_section(config(**settings), OWN)
    assert of_training.train_data_columns == "text"
    assert of_training.tokenize_train_data


@pytest.mark.parametrize("key", maxtext_config._REMEDIES)
def test_what_our_data_does_not_have_is_refused_with_a_way_out(key):
    value = True if maxtext_config._ACCEPTED[key] is False else 2.0
    with refused(rf"configuration: {key}={value}: .{{20}}"):
        maxtext_config.train_section(config(**{key: value}), OWN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train_data_columns": ["a", "b"]},
            r"train_data_columns=\['a', 'b'\]: text is in one column",
        ),
        ({"grain_file_type": "mmap"}, "grain_file_type must be one of .*not 'mmap'"),
        (
            {"tokenizer_type": "huggingface", "tokenizer_path": "org/model"},
            "tokenizer_path=org/model is not on this machine; download",
        ),
    ],
)
def test_a_value_without_a_meaning_here_is_refused(settings, message):
    with refused(f"^MaxText's configuration: {message}"):
        maxtext_config.train_section(config(**settings), OWN)


@pytest.mark.parametrize("path", ["gs://models/gemma", __file__])
def test_a_hugging_face_tokenizer_that_is_there_is_taken(path):
    settings = config(tokenizer_type="huggingface", tokenizer_path=path)
    assert maxtext_config.train_section(settings, OWN).tokenizer_path == path


def test_of_data_that_has_tokens_no_tokenizer_is_looked_at():
    settings = config(
        tokenize_train_data=False,
        tokenizer_type="huggingface",
        tokenizer_path="org/model",
    )
    assert not maxtext_config.train_section(settings, OWN).tokenizer_path


def test_files_are_named_absolutely_and_uris_as_they_are():
    here = os.getcwd()
    made = maxtext_config.train_section(
        config(
            grain_train_files="a*,b,0.25;gs://c/d,0.75",
            grain_eval_files="~/e",
            grain_train_mixture_config_path="m.json",
        ),
        OWN,
    )
    assert made.grain_train_files == f"{here}/a*,{here}/b,0.25;gs://c/d,0.75"
    assert made.grain_eval_files == os.path.expanduser("~/e")
    assert made.grain_train_mixture_config_path == f"{here}/m.json"


def test_maxtext_sees_no_tiers_and_asks_at_each_step_whether_to_save():
    raw = {"num_logical_shards": 8, "enable_multi_tier_checkpointing": True}
    theirs, own = maxtext_config.divide(raw)
    assert own.uses_tiers
    assert not theirs["enable_multi_tier_checkpointing"]
    assert theirs["enable_continuous_checkpointing"]
    theirs, own = maxtext_config.divide({"num_logical_shards": 8})
    assert not own.uses_tiers
    assert "enable_continuous_checkpointing" not in theirs


def test_tiers_of_checkpoints_are_taken_over_with_our_own_keys():
    tiers = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": "/local",
        "local_checkpoint_period": 20,
        "multi_tier_checkpointing_backup_interval_minutes": 30,
    }
    own = maxtext_config.Own(
        values={**OWN.values, "peer_copies": 1, "local_checkpoint_size_limit": "2Gi"},
        uses_tiers=True,
    )
    made = maxtext_config.tiers_config(
        config(max_num_checkpoints_to_keep=7, **tiers), own
    )
    assert made.tiers == schema.TiersSection(
        peer_copies=1, local_checkpoint_size_limit="2Gi", **tiers
    )
    assert made.checkpoint.max_num_checkpoints_to_keep == 7
    assert made.run.run_name == "first"
    # And they are none of the data's.
    assert maxtext_config.train_section(config(**tiers), own).num_logical_shards == 48


def test_a_key_of_the_tiers_is_checked_like_anywhere():
    raw = {"num_logical_shards": 12, "peer_copies": -2}
    with refused("^MaxText's configuration: peer_copies must be at least 0, not -2"):
        maxtext_config.divide(raw)


def rows(*, evaluation=False, **settings):
    made = config(**settings)
    return maxtext_config.global_batch_size(made, num_devices=8, evaluation=evaluation)


def test_the_batch_is_what_maxtext_s_step_takes():
    assert rows() == 48
    assert rows(evaluation=True) == 24


def test_a_batch_of_which_maxtext_throws_rows_away_is_refused():
    with refused("configuration: per_device_batch_size=0.5 makes MaxText load"):
        rows(per_device_batch_size=0.5)
    with refused("configuration: eval_per_device_batch_size=0.5 makes MaxText load"):
        rows(eval_per_device_batch_size=0.5, evaluation=True)


def test_a_batch_that_the_devices_cannot_share_is_refused():
    with refused(
        "per_device_batch_size=1.5 makes a global batch of 12 rows, which cannot"
    ):
        rows(per_device_batch_size=1.5, global_batch_size_to_load=12)


def test_a_model_without_a_row_for_every_token_is_refused():
    maxtext_config.check_vocabulary(config(), 32000)
    with refused("vocab_size=32000, but the tokenizer has 32001 tokens; set .* 32001"):
        maxtext_config.check_vocabulary(config(), 32001)


def test_a_misspelt_key_is_named_with_the_nearest_of_both_programs():
    known = {"steps", "packing", "num_epoch"}
    raw = {"num_logical_shards": 12, "steps": 5}
    maxtext_config.divide(raw, known=known)
    for wrong, near in {
        "num_logical_shard": "num_logical_shards",
        "pack": "packing",
        "peer_copie": "peer_copies",
    }.items():
        with refused(f"unknown key '{wrong}', of neither .* did you mean '{near}'"):
            maxtext_config.divide({**raw, wrong: 1}, known=known)


@pytest.mark.parametrize("is_in_file", [False, True])
def test_synthetic_data_that_was_asked_for_is_not_taken_for_files(tmp_path, is_in_file):
    arguments = ["dataset_type=synthetic", "steps=5"]
    if is_in_file:
        (tmp_path / "base.yml").write_text("dataset_type: synthetic\nsteps: 1\n")
        path = tmp_path / "mine.yml"
        path.write_text("base_config: base.yml\ndataset_type: synthetic\nx: [1]\n")
        arguments = [str(path), "steps=5"]
    raw = {"num_logical_shards": 12, "dataset_type": "synthetic"}
    explicit = maxtext_config.explicit_keys(arguments)
    with refused(
        "dataset_type=synthetic is data that MaxText generates.*grain_train_files"
    ):
        maxtext_config.divide(raw, explicit=explicit)
    # It is the default of MaxText's own file.
    (tmp_path / "base.yml").write_text("dataset_type: synthetic\n")
    (tmp_path / "other.yml").write_text("base_config: base.yml\nsteps: 3\n")
    files = [f"{tmp_path}/{name}.yml" for name in ("base", "other")]
    for arguments in ([], ["steps=5"], *([file, "steps=5"] for file in files)):
        explicit = maxtext_config.explicit_keys(arguments)
        assert maxtext_config.divide(raw, explicit=explicit)


def test_elastic_training_needs_hosts_or_pathways():
    raw = {"num_logical_shards": 12, "elastic_enabled": True}
    with refused("elastic_enabled=true without hosts: set hosts and slices"):
        maxtext_config.divide(raw)
    assert maxtext_config.divide({**raw, "enable_single_controller": True})


@pytest.mark.parametrize(
    ("settings", "location"),
    [
        (
            {"hf_path": "parquet", "hf_train_files": "/data/c4/*.parquet"},
            "to /data/c4/*.parquet",
        ),
        ({"hf_path": "json", "hf_train_files": "/d/*.json"}, "to ArrayRecord, Parquet"),
        ({"hf_path": "parquet"}, "to ArrayRecord, Parquet"),
        ({"hf_path": "allenai/c4"}, "to hf://datasets/allenai/c4/**/*train*.parquet"),
    ],
)
def test_the_files_of_another_pipeline_are_named_only_if_they_were_given(
    settings, location
):
    raw = {"num_logical_shards": 12, "dataset_type": "hf", **settings}
    with refused(re.escape(location)):
        maxtext_config.divide(raw)


def test_stages_of_a_run_of_maxtext_change_datasets_alone():
    def made(**stage):
        stages = [{"begin_step": 0}, {"begin_step": 5, **stage}]
        values = {**OWN.values, "data_stages": json.dumps(stages)}
        own = dataclasses.replace(OWN, values=values)
        return maxtext_config.train_section(config(), own)

    assert "b.array" in made(grain_train_files="b.array").data_stages
    with pytest.raises(errors.ConfigError, match="step 5 sets max_target_length, and"):
        made(max_target_length=77)


def test_a_file_may_have_one_of_maxtext_s_own_for_its_base(tmp_path, monkeypatch):
    configs = tmp_path / "installed" / "maxtext" / "configs"
    (configs / "post_train").mkdir(parents=True)
    (configs.parent / "__init__.py").write_text("")
    (configs / "base.yml").write_text("use_sft: false\npacking: true\n")
    ours = "base_config: base.yml\nuse_sft: true\npacking: false\n"
    (configs / "post_train" / "sft.yml").write_text(ours)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.delitem(sys.modules, "maxtext", raising=False)
    mine = tmp_path / "mine.yml"
    mine.write_text("base_config: post_train/sft.yml\nsteps: 3\n")
    config, _ = maxtext_config.settings_of(("use_sft",), [str(mine)])
    assert config.data.use_sft
    # What MaxText's file sets is no choice of the user's.
    assert maxtext_config.explicit_keys([str(mine), "seed=1"]) == {"steps", "seed"}
    mine.write_text("base_config: post_train/other.yml\n")
    with refused(f"{tmp_path}/post_train/other.yml: no such configuration file"):
        maxtext_config.settings_of(("use_sft",), [str(mine)])
