import socket
import urllib.error
import urllib.request

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.monitoring import prometheus


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return page.read().decode().splitlines()


def test_duration_is_a_histogram_in_seconds():
    with prometheus.serving(port=0) as port:
        for secs in (0.02, 0.02, 400.0):
            metrics.DATA_WAIT.record(secs)
        served = scrape(port)
    name = "elastic_ckpt_data_wait_seconds"
    assert f"# TYPE {name} histogram" in served
    assert f'{name}_bucket{{le="0.01"}} 0.0' in served
    assert f'{name}_bucket{{le="0.025"}} 2.0' in served
    assert f'{name}_bucket{{le="300.0"}} 2.0' in served
    assert f'{name}_bucket{{le="600.0"}} 3.0' in served
    assert f"{name}_count 3.0" in served


def test_level_is_its_last_value_and_an_amount_its_sum():
    with prometheus.serving(port=0) as port:
        assert not [line for line in scrape(port) if "read_ahead_batches" in line]
        for value in (3, 1):
            metrics.DATA_READ_AHEAD.record(value)
            metrics.DATA_BYTES.record(value)
        served = scrape(port)
    assert "elastic_ckpt_data_read_ahead_batches 1.0" in served
    assert "elastic_ckpt_data_bytes_total 4.0" in served


def test_port_is_free_when_the_block_has_ended():
    with prometheus.serving(port=0) as port:
        scrape(port)
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    with prometheus.serving(port=port):
        pass


@pytest.mark.parametrize("port", ["taken", 65536])
def test_port_that_cannot_be_had_is_named(port):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port == "taken" else port
        message = rf"127\.0\.0\.1, port {port} .*prometheus_port"
        with (
            pytest.raises(errors.ConfigError, match=message),
            prometheus.serving(port=port),
        ):
            pass
