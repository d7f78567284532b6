import dataclasses

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import keys, load, schema


def write(path, text):
    path.write_text(text)
    return path


def refused(match):
    return pytest.raises(errors.ConfigError, match=match)


def test_a_file_overrides_its_base_and_the_command_line_overrides_both(tmp_path):
    write(tmp_path / "base.yml", "steps: 5\nhosts: 3\nlog_period: 2\n")
    path = write(tmp_path / "run.yml", "base_config: base.yml\nhosts: 4\nsteps: 6\n")
    config = load.load(path, ["steps=7", "steps=8"])
    assert (config.run.steps, config.world.hosts, config.run.log_period) == (8, 4, 2)


def test_the_base_of_all_defaults_needs_no_file(tmp_path):
    path = write(tmp_path / "run.yml", "base_config: base.yml\nhosts: 4\n")
    config = load.load(path)
    world = schema.WorldSection(hosts=4)
    assert config == dataclasses.replace(schema.Config(), world=world)
    with refused(r"none\.yml: no such configuration file \(base_config of"):
        load.load(write(tmp_path / "a.yml", "base_config: none.yml"))


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load.load(write(tmp_path / "a.yml", "")) == schema.Config()


def test_an_unknown_key_is_refused_with_file_line_and_the_nearest_key(tmp_path):
    path = write(tmp_path / "a.yml", "steps: 5\n\nchekpoint_period: 3\n")
    with refused(
        r"a\.yml, line 3: unknown key 'chekpoint_period'; .*'checkpoint_period'"
    ):
        load.load(path)


def test_an_unknown_key_in_a_base_is_named_with_the_base(tmp_path):
    write(tmp_path / "base.yml", "stesp: 5\n")
    with refused(r"base\.yml, line 1: unknown key 'stesp'; .*'steps'"):
        load.load(write(tmp_path / "a.yml", "base_config: base.yml"))


def test_a_mistyped_override_is_refused(tmp_path):
    path = write(tmp_path / "a.yml", "")
    with refused(r"command line, 'host=2': unknown key 'host'; .*'hosts'"):
        load.load(path, ["host=2"])
    with refused(r"command line, 'steps': write it as key=value"):
        load.load(path, ["steps"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps: soon", "steps must be a whole number, not 'soon'"),
        ("steps: 2.5", "steps must be a whole number, not 2.5"),
        ("steps: true", "steps must be a whole number, not True"),
        ("steps: 0", "steps must be at least 1, not 0"),
        ("steps: [1]", r"steps must be a whole number, not \[1\]"),
        (
            "enable_checkpointing: 1",
            "enable_checkpointing must be true or false, not 1",
        ),
        ("run_name: 5", "run_name must be text, not 5"),
        ("learning_rate: fast", "learning_rate must be a number, not 'fast'"),
        ("learning_rate: .nan", "learning_rate must be at least 0"),
        ("hardware: fpga", 'hardware must be one of "cpu", "gpu", "tpu", not \'fpga\''),
        (
            "grain_file_type: csv",
            'grain_file_type must be one of "arrayrecord", "arrow", "jsonl".*, not',
        ),
    ],
)
def test_an_invalid_value_is_refused_with_its_line(tmp_path, setting, message):
    with refused(rf"a\.yml, line 2: {message}"):
        load.load(write(tmp_path / "a.yml", f"# why\n{setting}\n"))


def test_a_key_set_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.yml", "steps: 1\nhosts: 1\nsteps: 2\n")
    with refused(r"line 3: steps is already set in line 1"):
        load.load(path)


def test_a_base_that_includes_the_file_again_is_refused(tmp_path):
    write(tmp_path / "a.yml", "base_config: b.yml")
    with refused("includes this file again"):
        load.load(write(tmp_path / "b.yml", "base_config: a.yml"))


@pytest.mark.parametrize("text", ["- steps", "steps: [", "just words"])
def test_what_is_not_a_mapping_is_refused(tmp_path, text):
    with refused(r"a\.yml"):
        load.load(write(tmp_path / "a.yml", text))


def test_a_missing_file_or_base_is_named(tmp_path):
    with refused("none.yml: no such configuration file"):
        load.load(tmp_path / "none.yml")
    with refused(r"none.yml: no such configuration file \(base_config of .*a.yml\)"):
        load.load(write(tmp_path / "a.yml", "base_config: none.yml"))


@pytest.mark.parametrize("text", ["1e-3", "1.e-3", "0.001"])
def test_numbers_are_read_as_people_write_them(tmp_path, text):
    config = load.load(write(tmp_path / "a.yml", ""), [f"learning_rate={text}"])
    assert config.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize("key", ["eval_interval", "eval_steps", "max_segments_per_seq"])
def test_minus_one_as_maxtext_writes_it_is_off(tmp_path, key):
    path = write(tmp_path / "a.yml", f"{key}: -1\n")
    assert load.load(path) == schema.Config()
    with refused(f"{key} must be at least 0, not -2"):
        load.load(path, [f"{key}=-2"])


def test_columns_may_be_a_list_as_maxtext_writes_it(tmp_path):
    path = write(tmp_path / "a.yml", "train_data_columns: ['body']\n")
    assert load.load(path).data.train_data_columns == "body"
    several = load.load(path, ["train_data_columns=['a', 'b']"])
    assert several.data.train_data_columns == "a,b"
    for wrong in ("[]", "['a', 1]"):
        with refused(r"train_data_columns must be text, not \["):
            load.load(path, [f"train_data_columns={wrong}"])
    with refused(r"tokenizer_type must be text, not \['bytes'\]"):
        load.load(path, ["tokenizer_type=['bytes']"])


def test_a_configuration_survives_the_way_through_its_values():
    config = schema.Config(run=schema.RunSection(run_name="x", steps=3))
    assert load.from_values(keys.values(config), place="here") == config


@pytest.mark.parametrize("text", ["off", "no", "Off", '"off"'])
def test_off_of_yaml_is_the_text_for_keys_that_have_it(tmp_path, text):
    path = write(tmp_path / "run.yml", f"divergence_action: {text}\n")
    assert load.load(path).divergence.divergence_action == "off"
    config = load.load(path, [f"divergence_action={text}"])
    assert config.divergence.divergence_action == "off"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("adam_b1=1.0", "adam_b1 must be below 1, not 1.0"),
        ("adam_b2=1", "adam_b2 must be below 1, not 1"),
        ("adam_b2=.inf", "adam_b2 must be a finite number, not inf"),
        ("learning_rate=inf", "learning_rate must be a finite number, not 'inf'"),
        ("adam_eps=.nan", "adam_eps must be at least 0, not nan"),
        (
            "divergence_slow_smoothing=1",
            "divergence_slow_smoothing must be below 1, not 1",
        ),
        ("head_dim=15", "head_dim must be a multiple of 2, not 15"),
        ("divergence_action=true", "divergence_action must be text, not True"),
        (
            "run_name=7",
            'run_name must be text, not 7; put it in quotes (run_name: "7")',
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(tmp_path, setting, problem):
    with pytest.raises(errors.ConfigError) as caught:
        load.load(write(tmp_path / "a.yml", ""), [setting])
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
