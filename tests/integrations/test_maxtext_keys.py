"""From MaxText's keys to ours; tests/refusals/maxtext.py has what is refused."""

import json
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import data_keys
from elastic_ckpt.integrations import maxtext_keys
from elastic_ckpt.training import schema
from tests.integrations.stand_in import config

# Keys of ours, and those of MaxText that it does not see.
RAW = {"num_logical_shards": 48, "tokenizer_type": "sentencepiece"}


def ours(**raw):
    return maxtext_keys.divide({**RAW, **raw})[1]


def test_what_maxtext_refuses_and_we_support_is_switched_off_for_maxtext():
    raw = {
        "num_logical_shards": 12,
        "tokenizer_type": "tiktoken",
        "grain_use_elastic_iterator": True,
        "colocated_python_data_input": True,
        "enable_multi_tier_checkpointing": True,
        "enable_rampup_batch_size": True,
        **{"hosts": 4, "slices": 2, "faults": "", "peer_tls_key": "/tls/key"},
        **{"elastic_enabled": True, "enable_single_controller": True},
    }
    theirs, own = maxtext_keys.divide(raw)
    assert theirs == {
        "dataset_type": "grain",
        # Its own tokenizer stays with it, and its own elastic mode under Pathways.
        "tokenizer_type": "tiktoken",
        **{"elastic_enabled": True, "enable_single_controller": True},
        "grain_use_elastic_iterator": False,
        "colocated_python_data_input": False,
        "enable_multi_tier_checkpointing": False,
        "enable_rampup_batch_size": False,
        # It asks our manager at each step whether to save.
        "enable_continuous_checkpointing": True,
    }
    switched = ("colocated_python_data_input", "enable_multi_tier_checkpointing")
    assert all(own[key] for key in (*switched, "enable_rampup_batch_size"))


def test_every_setting_that_both_have_is_taken_over_and_defaults_mean_the_same():
    common = {
        "grain_train_files": "/data/a*",
        "grain_record_format": "tf_example",
        "num_logical_shards": 48,
        "packing": True,
    }
    assert maxtext_keys.data_keys(config(), ours()) == data_keys.DataKeys(
        num_epoch=1,
        tokenizer_type="sentencepiece",
        tokenizer_path="/models/llama2",
        max_target_length=2048,
        grain_worker_count=1,
        **common,
    )
    own = {"corrupt_records": "skip", "tokenizer_type": "bytes"}
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
        "grain_worker_count": -1,
        "max_segments_per_seq": 5,
        "max_target_length": 64,
        "num_epoch": 2,
        "use_truncation": False,
    }
    made = maxtext_keys.data_keys(
        config(train_data_columns=["body"], **settings),
        ours(colocated_python_data_input=True, **own),
    )
    assert made == data_keys.DataKeys(
        train_data_columns="body",
        colocated_python_data_input=True,
        **common,
        **settings,
        **own,
    )


def test_fine_tuning_and_evaluation_have_columns_of_their_own():
    chats = config(
        use_sft=True,
        sft_train_on_completion_only=True,
        train_data_columns=["prompt", "completion"],
        eval_data_columns=["question", "answer"],
        chat_template_path="/models/chat.jinja",
        tokenize_eval_data=False,
    )
    own = ours(chat_template_date="2026-01-01")
    made = maxtext_keys.data_keys(chats, own)
    assert made.use_sft
    assert made.sft_train_on_completion_only
    assert made.train_data_columns == "prompt,completion"
    assert made.chat_template_path == "/models/chat.jinja"
    assert made.chat_template_date == "2026-01-01"
    made = maxtext_keys.data_keys(chats, own, evaluation=True)
    assert made.train_data_columns == "question,answer"
    assert not made.tokenize_train_data
    # Data that has tokens needs no tokenizer.
    assert not made.tokenizer_path


def test_keys_of_tiers_are_maxtext_s_and_ours():
    of_maxtext = {
        "local_checkpoint_directory": "/ram",
        "local_checkpoint_period": 5,
        "multi_tier_checkpointing_backup_interval_steps": 50,
    }
    own = {
        "enable_multi_tier_checkpointing": True,
        "peer_copies": 1,
        "local_checkpoint_size_limit": "2Gi",
    }
    theirs = config(max_num_checkpoints_to_keep=7, **of_maxtext)
    made = maxtext_keys.tiers(theirs, ours(**own))
    assert made.tiers == schema.TiersSection(**own, **of_maxtext)
    assert made.checkpoint.max_num_checkpoints_to_keep == 7
    assert made.run.run_name == "first"


def test_stages_of_a_run_of_maxtext_change_datasets_alone():
    def made(**stage):
        stages = [{"begin_step": 0}, {"begin_step": 5, **stage}]
        return maxtext_keys.data_keys(config(), ours(data_stages=json.dumps(stages)))

    assert "b.array" in made(grain_train_files="b.array").data_stages
    with pytest.raises(
        errors.ConfigError, match=r"max_target_length in .* at step 5 is"
    ):
        made(max_target_length=77)


def test_a_file_may_have_one_of_maxtext_s_own_for_its_base(tmp_path, monkeypatch):
    configs = tmp_path / "installed" / "maxtext" / "configs"
    (configs / "post_train").mkdir(parents=True)
    (configs.parent / "__init__.py").write_text("")
    (configs / "base.yml").write_text("use_sft: false\npacking: true\n")
    theirs = "base_config: base.yml\nuse_sft: true\npacking: false\n"
    (configs / "post_train" / "sft.yml").write_text(theirs)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.delitem(sys.modules, "maxtext", raising=False)
    mine = tmp_path / "mine.yml"
    mine.write_text("base_config: post_train/sft.yml\nsteps: 3\n")
    given = maxtext_keys.given([str(mine), "seed=1"])
    assert given == {"use_sft": True, "packing": False, "steps": 3, "seed": 1}
    mine.write_text("base_config: post_train/other.yml\n")
    with pytest.raises(errors.ConfigError, match=r"post_train/other\.yml: no such"):
        maxtext_keys.given([str(mine)])


RUN = ["run_name=a", "base_output_directory=/runs", "per_device_batch_size=6"]


def test_the_supervisor_reads_its_keys_among_those_of_maxtext(tmp_path):
    file = tmp_path / "run.yml"
    file.write_text(
        "base_config: base.yml\nhosts: 4\nsteps: 9\nmodel_name: llama2-7b\n"
        "multi_tier_checkpointing_backup_interval_minutes: null\n"
        "max_num_checkpoints_to_keep: None\n"
    )
    given = [str(file), *RUN, "slices=2", "elastic_enabled=true", "dtype=float32"]
    made = maxtext_keys.supervised(maxtext_keys.given(given))
    assert (made.world.hosts, made.world.slices, made.run.steps) == (4, 2, 9)
    assert made.elastic.elastic_enabled
    # The rows of all slices stay those of a batch when there are fewer.
    assert made.data.global_batch_size == 24
    assert maxtext_keys.supervised({}).world.hosts == 1
