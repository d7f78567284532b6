"""Requests are admitted while their bytes fit, and one always if none is in flight."""

import threading

import pytest

from elastic_ckpt.universal.reading.in_flight import InFlight


def waits(in_flight, request_bytes, buffer_bytes=0):
    """Begins a request in a thread; whether it has to wait is seen by the caller."""
    admitted = threading.Event()

    def begin():
        if in_flight.begin(request_bytes, buffer_bytes):
            admitted.set()

    thread = threading.Thread(target=begin)
    thread.start()
    return thread, admitted


def test_a_request_over_the_budget_is_admitted_alone():
    in_flight = InFlight(10)
    assert in_flight.begin(100, 0)
    thread, admitted = waits(in_flight, 1)
    thread.join(0.05)
    assert not admitted.is_set()
    in_flight.done(100)
    thread.join()
    assert admitted.is_set()


def test_bytes_of_buffers_are_in_flight_until_they_are_handed_on():
    in_flight = InFlight(10)
    assert in_flight.begin(1, 10)
    in_flight.done(1, completed=1)
    thread, admitted = waits(in_flight, 1, 10)
    thread.join(0.05)
    assert not admitted.is_set()
    in_flight.handed_on(10, completed=1)
    thread.join()
    assert admitted.is_set()


def test_buffers_that_wait_for_further_requests_do_not_block_them():
    in_flight = InFlight(10)
    assert in_flight.begin(1, 100)
    in_flight.done(1)
    # The first buffer is complete in part alone: only this request can go on.
    assert in_flight.begin(1, 100)
    assert in_flight.peak_bytes == 201


@pytest.mark.parametrize("buffer_bytes", [0, 10])
def test_a_request_that_waits_is_refused_at_the_end(buffer_bytes):
    in_flight = InFlight(10)
    assert in_flight.begin(10, 10)
    thread, admitted = waits(in_flight, 10, buffer_bytes)
    in_flight.end()
    thread.join()
    assert not admitted.is_set()
