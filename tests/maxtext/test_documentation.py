"""MAXTEXT.md works as it is written."""

import json
import os
import re
import subprocess

import numpy as np
import pytest

from elastic_ckpt.integrations import maxtext_config, maxtext_seams
from tests import corpora
from tests.maxtext import environment, small_models
from tests.universal import safetensors_files

PAGE = (environment.ROOT / "elastic_ckpt/integrations/MAXTEXT.md").read_text()


def blocks():
    return re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_the_way_to_set_it_up_is_that_of_the_dependency_group():
    written = [" ".join(line.replace("\\\n", "").split()) for line in [blocks()[0]]]
    commands = [" ".join(c.split()) for c in environment.documented_commands()]
    assert written == [" ".join(commands)]
    assert len(commands) == 2


def test_it_installs_the_version_that_the_seam_is_written_for():
    assert f'"maxtext=={maxtext_seams.TESTED_VERSION}"' in environment.GROUP.read_text()
    assert f"MaxText {maxtext_seams.TESTED_VERSION} from PyPI" in PAGE


def test_it_names_each_key_of_ours_and_each_that_is_refused():
    for key in maxtext_config.OWN_KEYS:
        assert f"| `{key}` |" in PAGE
    for key in maxtext_config._REMEDIES:
        assert f"`{key}`" in PAGE


@pytest.mark.slow(minutes=0.1)
def test_each_key_of_maxtext_for_what_we_replace_is_read_or_listed():
    environment.set_up()
    (base,) = environment.ENVIRONMENT.glob(
        "lib/*/site-packages/maxtext/configs/base.yml"
    )
    pattern = r"^((?:grain|elastic|mtc|multi_tier|local_checkpoint)_\w+):"
    keys = set(re.findall(pattern, base.read_text(), re.MULTILINE))
    assert {"grain_train_files", "elastic_enabled"} < keys
    read = set(maxtext_config.MAXTEXT_KEYS)
    assert not {key for key in keys - read if f"`{key}`" not in PAGE}


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.9)
def test_the_worked_command_trains_and_continues(tmp_path):
    environment.set_up()
    (tmp_path / ".venv-maxtext").symlink_to(environment.ENVIRONMENT)
    commands = blocks()[1]
    for steps in (10, 12):
        ended = subprocess.run(
            ["bash", "-ec", commands.replace("steps=10", f"steps={steps}")],
            cwd=tmp_path,
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/cache"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-5000:]
    printed = re.findall(r"completed step: (\d+),", ended.stderr)
    assert printed == ["10", "11"]


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.7)
def test_the_command_for_weights_of_hugging_face_writes_what_maxtext_begins_with(
    tmp_path,
):
    environment.set_up()
    source, name = tmp_path / "Llama-3.1-8B", "llama3.1"
    source.mkdir()
    vocab_size = 259
    tensors = small_models.tensors(name)
    for each in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[each] = np.resize(tensors[each], (vocab_size, small_models.EMBED))
    config = {**small_models.hf_config(name), "vocab_size": vocab_size}
    (source / "config.json").write_text(json.dumps(config))
    safetensors_files.write(source / "model.safetensors", tensors)
    texts = [{"text": f"text {number}"} for number in range(20)]
    corpora.write_arrayrecord(tmp_path / "a.array_record", texts)
    keys = {
        **small_models.maxtext_settings(name),
        "load_parameters_path": "$PWD/runs/llama/0/items",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "override_model_config": True,
        "run_name": "begun",
        "base_output_directory": "$PWD/runs",
        "steps": 2,
        "attention": "dot_product",
        "enable_goodput_recording": False,
        "grain_train_files": "$PWD/a.array_record",
        "num_logical_shards": 2,
        "tokenizer_type": "bytes",
        "vocab_size": vocab_size,
        "per_device_batch_size": 2,
        "max_target_length": 16,
    }
    commands = blocks()[2]
    assert commands.startswith("elastic-ckpt convert ")
    assert commands.count("\n") == 1
    written = " ".join(f"{key}={value}" for key, value in keys.items())
    ended = subprocess.run(
        ["bash", "-ec", f"{commands}elastic-ckpt maxtext {written}"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{environment.ENVIRONMENT}/bin:{os.environ['PATH']}",
            "DECOUPLE_GCLOUD": "TRUE",
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert "completed step: 1," in ended.stderr
