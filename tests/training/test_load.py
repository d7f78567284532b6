import dataclasses

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import load, schema


def write(path, text):
    path.write_text(text)
    return path


def test_file_overrides_its_base_and_the_command_line_overrides_both(tmp_path):
    write(tmp_path / "base.yml", "steps: 5\nhosts: 3\nlog_period: 2\n")
    path = write(tmp_path / "run.yml", "base_config: base.yml\nhosts: 4\nsteps: 6\n")
    config = load.load(path, ["steps=7", "steps=8"])
    assert (config.run.steps, config.world.hosts, config.run.log_period) == (8, 4, 2)


def test_what_the_command_line_gives_may_be_empty_or_no_yaml():
    settings = load.settings(None, ["a=", "b=[x", "c=1"])
    found = {key: each.value for key, each in settings.items()}
    assert found == {"a": "", "b": "[x", "c": 1}


def test_no_two_sections_have_the_same_key():
    assert len(load.keys()) == sum(len(vars(s)) for s in vars(schema.Config()).values())


def test_base_of_all_defaults_needs_no_file(tmp_path):
    path = write(tmp_path / "run.yml", "base_config: base.yml\nhosts: 4\n")
    world = schema.WorldSection(hosts=4)
    assert load.load(path) == dataclasses.replace(schema.Config(), world=world)
    assert load.load(write(tmp_path / "a.yml", "")) == schema.Config()


def test_broken_yaml_is_named_by_its_file(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"a\.yml"):
        load.load(write(tmp_path / "a.yml", "steps: ["))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("learning_rate", "1.e-3", 1e-3),
        # As MaxText writes them.
        ("eval_interval", "-1", 0),
        ("eval_steps", "-1", 0),
        ("max_segments_per_seq", "-1", 0),
        ("train_data_columns", "['body']", "body"),
        ("train_data_columns", "['a', 'b']", "a,b"),
        # Which YAML takes for false.
        ("divergence_action", "off", "off"),
        ("divergence_action", "no", "off"),
        ("divergence_action", '"off"', "off"),
    ],
)
def test_values_are_read_as_people_write_them(tmp_path, key, text, value):
    path = write(tmp_path / "a.yml", "")
    in_file = write(tmp_path / "b.yml", f"{key}: {text}\n")
    for config in (load.load(path, [f"{key}={text}"]), load.load(in_file)):
        default = load.values(schema.Config())
        assert load.values(config) == default | {key: value or default[key]}


def test_configuration_survives_the_way_through_its_values():
    config = schema.Config(run=schema.RunSection(run_name="x", steps=3))
    assert load.from_values(load.values(config), place="here") == config
