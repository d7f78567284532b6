"""From MaxText's keys to ours; tests/refusals/maxtext.py has what is refused."""

import dataclasses
import json
import os
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import data_keys
from elastic_ckpt.integrations import maxtext_config
from elastic_ckpt.training import schema
from tests.integrations import stand_in
from tests.integrations.stand_in import config

OWN = maxtext_config.Own(values={"num_logical_shards": 48})


def test_the_keys_that_are_read_are_those_of_the_stand_in():
    assert set(maxtext_config.MAXTEXT_KEYS) == stand_in.DEFAULTS.keys()


def test_what_maxtext_refuses_and_we_support_is_switched_off_for_maxtext():
    raw = {
        "num_logical_shards": 12,
        "tokenizer_type": "tiktoken",
        "grain_use_elastic_iterator": True,
        "colocated_python_data_input": True,
        "enable_multi_tier_checkpointing": True,
        **{"hosts": 4, "slices": 2, "faults": ""},
        **{"elastic_enabled": True, "enable_single_controller": True},
    }
    theirs, own = maxtext_config.divide(raw)
    assert theirs == {
        "dataset_type": "grain",
        # Its own tokenizer stays with it, and its own elastic mode under Pathways.
        "tokenizer_type": "tiktoken",
        **{"elastic_enabled": True, "enable_single_controller": True},
        "grain_use_elastic_iterator": False,
        "colocated_python_data_input": False,
        "enable_multi_tier_checkpointing": False,
        # It asks our manager at each step whether to save.
        "enable_continuous_checkpointing": True,
    }
    assert own.values == {"num_logical_shards": 12, "grain_record_format": "tf_example"}
    assert own.in_sidecar
    assert own.uses_tiers


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


def test_fine_tuning_and_evaluation_have_columns_of_their_own():
    settings = {
        "use_sft": True,
        "sft_train_on_completion_only": True,
        "train_data_columns": ["prompt", "completion"],
        "eval_data_columns": ["question", "answer"],
        "chat_template_path": "/models/chat.jinja",
        "tokenize_eval_data": False,
    }
    own = dataclasses.replace(
        OWN, values={**OWN.values, "chat_template_date": "2026-01-01"}
    )
    made = maxtext_config.train_section(config(**settings), own)
    assert made.use_sft
    assert made.sft_train_on_completion_only
    assert made.tokenize_train_data
    assert made.train_data_columns == "prompt,completion"
    assert made.chat_template_path == "/models/chat.jinja"
    assert made.chat_template_date == "2026-01-01"
    assert maxtext_config.eval_section(config(**settings), own) == dataclasses.replace(
        made, train_data_columns="question,answer", tokenize_train_data=False
    )


def test_data_that_has_tokens_needs_no_tokenizer():
    settings = config(
        tokenize_train_data=False,
        tokenizer_type="huggingface",
        tokenizer_path="org/model",
    )
    assert not maxtext_config.train_section(settings, OWN).tokenizer_path


def test_local_files_are_named_absolutely_and_urls_as_they_are():
    here = os.getcwd()
    made = maxtext_config.train_section(
        config(
            grain_train_files="a*,b,0.25;gs://c/d,0.75",
            grain_eval_files="~/e",
            grain_train_mixture_config_path="m.json",
            base_output_directory="gs://bucket/runs",
        ),
        OWN,
    )
    assert made.grain_train_files == f"{here}/a*,{here}/b,0.25;gs://c/d,0.75"
    assert made.grain_eval_files == os.path.expanduser("~/e")
    assert made.grain_train_mixture_config_path == f"{here}/m.json"


def test_keys_of_tiers_are_maxtext_s_and_ours():
    tiers = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": "/ram",
        "local_checkpoint_period": 5,
        "multi_tier_checkpointing_backup_interval_steps": 50,
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


def test_a_global_batch_is_what_maxtext_s_step_takes():
    def rows(**options):
        return maxtext_config.global_batch_size(config(), num_devices=8, **options)

    assert (rows(), rows(evaluation=True)) == (48, 24)
    maxtext_config.check_vocabulary(config(), 32000)


def test_synthetic_data_is_refused_only_if_the_user_asked_for_it(tmp_path):
    (tmp_path / "base.yml").write_text("dataset_type: synthetic\nsteps: 1\n")
    (tmp_path / "other.yml").write_text("base_config: base.yml\nsteps: 3\n")
    asks = "base_config: base.yml\ndataset_type: synthetic\nx: [1]\n"
    (tmp_path / "asks.yml").write_text(asks)
    base, other, asks = (f"{tmp_path}/{n}.yml" for n in ("base", "other", "asks"))

    def divided(*arguments):
        raw = {"num_logical_shards": 12, "dataset_type": "synthetic"}
        explicit = maxtext_config.explicit_keys(arguments)
        return maxtext_config.divide(raw, explicit=explicit)

    for arguments in (["dataset_type=synthetic", "steps=5"], [asks]):
        with pytest.raises(
            errors.ConfigError, match=r"=synthetic is data that MaxText generates"
        ):
            divided(*arguments)
    for arguments in ([], ["steps=5"], [base], [other, "steps=5"]):
        assert divided(*arguments)[0]["dataset_type"] == "grain"


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
    read, _ = maxtext_config.settings_of(("use_sft",), [str(mine)])
    assert read.data.use_sft
    # What MaxText's file sets is no choice of the user's.
    assert maxtext_config.explicit_keys([str(mine), "seed=1"]) == {"steps", "seed"}
    mine.write_text("base_config: post_train/other.yml\n")
    with pytest.raises(errors.ConfigError, match=r"post_train/other\.yml: no such"):
        maxtext_config.settings_of(("use_sft",), [str(mine)])
