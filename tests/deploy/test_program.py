"""Which program the pods run, and the files and variables that it has."""

import pytest
import yaml

from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext_elastic
from tests.deploy import jobsets, manifest_check

NAMES = [jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS]


def program(name, *overrides, **settings):
    """The container of the program; there is one in each kind of JobSet."""
    roles = jobsets.roles(name, *overrides, **settings)
    _, container = roles.get("host") or roles["head"]
    return container


def variables(container):
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("setting", "command"),
    [
        ("command=python train.py --lr '1 2'", ["python", "train.py", "--lr", "1 2"]),
        ("command=[python, train.py, 3]", ["python", "train.py", "3"]),
        (
            "command=[sh, -c, 'a | b && c']",
            ["sh", "-c", "a | b && c"],
        ),
        (
            "command=elastic-ckpt maxtext my.yml steps=5",
            ["elastic-ckpt", "maxtext", "my.yml", "steps=5"],
        ),
        (
            "python_module=project.train --lr=1",
            ["python", "-m", "project.train", "--lr=1"],
        ),
    ],
)
def test_the_program_is_the_users(name, setting, command):
    assert program(name, setting)["command"] == command
    assert manifest_check.problems(jobsets.documents(name, setting)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_program_of_the_user_finds_its_place_its_files_and_its_ram_disk(name):
    settings = {"command": "a", "local_checkpoint_directory": "/ram"}
    container = program(name, **settings)
    directory = next(
        m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config"
    )
    values = variables(container)
    assert values["ELASTIC_CKPT_CONFIG"] == f"{directory}/config.yml"
    assert values["ELASTIC_CKPT_LOCAL"] == "/ram"
    assert {"POD_IP", "ELASTIC_CKPT_DOMAINS"} <= values.keys()
    (text,) = jobsets.only("ConfigMap", jobsets.documents(name, **settings))[
        "data"
    ].values()
    assert yaml.safe_load(text)["run_name"].startswith("demo-")
    without = variables(program(name, command="a", local_checkpoint_directory=""))
    assert "ELASTIC_CKPT_LOCAL" not in without
    # `train` has them in its configuration.
    assert "ELASTIC_CKPT_CONFIG" not in variables(program(name))


def test_a_program_of_the_user_needs_neither_our_data_nor_our_directory():
    settings = {"base_output_directory": "runs", "global_batch_size": 7}
    with pytest.raises(errors.ConfigError, match="base_output_directory"):
        jobsets.documents(jobsets.GPU, **settings)
    assert jobsets.documents(jobsets.GPU, command="a", **settings)


@pytest.mark.parametrize("name", NAMES)
def test_maxtext_runs_with_its_keys_and_with_the_place_of_the_run(name):
    keys = "maxtext={model_name: llama2-7b, steps: 7}"
    container = program(name, keys)
    assert container["command"][:2] == ["elastic-ckpt", "maxtext"]
    config_map = jobsets.only("ConfigMap", jobsets.documents(name, keys))
    file = container["command"][2].rpartition("/")[2]
    values = yaml.safe_load(config_map["data"][file])
    assert values["model_name"] == "llama2-7b"
    assert values["base_config"] == "base.yml"
    assert values["base_output_directory"] == "gs://my-bucket/runs"
    # The user's key counts.
    assert values["steps"] == 7
    # With it MaxText asks the cluster for the other hosts, as with tpu.
    hardware = {jobsets.GPU: "gpu_multiprocess"}.get(name, "tpu")
    assert values["hardware"] == hardware
    is_single = values.get("enable_single_controller", False)
    assert is_single == (name == jobsets.PATHWAYS)


def test_the_verb_reads_the_file_with_maxtexts_keys(tmp_path):
    built = jobsets.documents("maxtext_v6e")
    ((name, text),) = jobsets.only("ConfigMap", built)["data"].items()
    path = tmp_path / name
    path.write_text(text)
    config = maxtext_elastic.run_config([str(path)])
    # JobSet starts the hosts, and MaxText's tiers use the RAM disk of the pods.
    assert config.world.hosts == 1
    assert config.tiers.enable_multi_tier_checkpointing
    mounted = jobsets.roles("maxtext_v6e")["host"][1]["volumeMounts"]
    paths = [mount["mountPath"] for mount in mounted]
    assert config.tiers.local_checkpoint_directory in paths


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["command=a", "python_module=b"], "command and python_module are set"),
        (["command=a | b"], "has '|', which only a shell understands"),
        (["command=a 'b"], "cannot be split: No closing quotation"),
        (["maxtext=llama"], "maxtext takes a mapping"),
        (["maxtext={a: 1}", "base_output_directory=runs"], "is local to each pod"),
    ],
)
def test_a_program_that_cannot_run_is_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message.replace("|", r"\|")):
        jobsets.documents(jobsets.GPU, *settings)
