import dataclasses
import socket
import sys
import urllib.request

import pytest

from elastic_ckpt.core import errors, jsonlog, metrics
from elastic_ckpt.training import journal, schema
from tests.monitoring import event_file


def config(directory, **section):
    return schema.Config(
        run=schema.RunSection(run_name="tiny", base_output_directory=str(directory)),
        metrics=schema.MetricsSection(**section),
    )


def listening(config):
    return journal.listening(journal.path_of(config), config.metrics)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_json_lines_are_always_written_also_when_the_run_fails(tmp_path):
    def fail():
        with listening(config(tmp_path)):
            metrics.DATA_ROWS.record(8)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    metrics.DATA_ROWS.record(16)
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["metrics"]
    (line,) = jsonlog.read(tmp_path / "tiny" / "metrics" / "host-00000.jsonl")
    assert (line["metric"], line["last"]) == (metrics.DATA_ROWS.name, 8.0)


def test_hosts_have_ports_of_their_own_the_same_on_every_machine():
    assert ports_of(hosts=3) == [9100, 9101, 9102]
    nothing = schema.Config()
    assert journal.with_own_port(nothing, 2) == nothing
    assert ports_of(hosts=6, elastic_machines=2) == [9100, 9101, 9102] * 2
    # A world without the first machine.
    assert ports_of(hosts=6, elastic_machines=2, there=3) == [9100, 9101, 9102]


def ports_of(*, hosts, elastic_machines=1, there=None):
    """The ports of the hosts of a world, which has `there` of all hosts of the run."""
    run = schema.Config(
        metrics=schema.MetricsSection(prometheus_port=9100),
        world=schema.WorldSection(hosts=hosts),
        elastic=schema.ElasticSection(elastic_machines=elastic_machines),
    )
    processes = [journal.with_own_port(run, n) for n in range(there or hosts)]
    return [process.metrics.prometheus_port for process in processes]


def test_supervisor_has_files_and_a_port_beside_those_of_its_hosts(tmp_path):
    port = free_port()
    keys = {"enable_tensorboard": True, "prometheus_port": port - 3}
    three = dataclasses.replace(
        config(tmp_path, **keys), world=schema.WorldSection(hosts=3)
    )
    with journal.listening_of_supervisor(three):
        metrics.TRAIN_STEPS.record(40)
        metrics.GOODPUT.record(75)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            assert b"\nelastic_ckpt_goodput_percent 75.0\n" in page.read()
    lines = jsonlog.read(tmp_path / "tiny" / "metrics" / "run.jsonl")
    assert [(line["last"], line["step"]) for line in lines] == [(40.0, 40), (75.0, 40)]
    assert event_file.scalars(tmp_path / "tiny" / "tensorboard" / "run") == [
        ("elastic_ckpt/train/steps", 40, 40.0),
        ("elastic_ckpt/goodput/percent", 40, 75.0),
    ]


def test_no_extra_is_asked_for_unless_it_is_needed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with listening(config(tmp_path)):
        pass
    for key, extra in (("enable_tensorboard", "tensorboard"), ("prometheus_port", "p")):
        needed = config(tmp_path, **{key: 9100 if extra == "p" else True})
        missing = pytest.raises(errors.ConfigError, match=rf"pip install '\.\[{extra}")
        with missing, journal.listening_of_supervisor(needed):
            raise AssertionError("it begins")
