"""Names, images and amounts of memory that Kubernetes takes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import names, quantity

ROOM = 63 - len("-slice-1-15")


def check_run(name):
    names.check_jobset_name(name, {"slice": (2, 16)})


def check_size(size):
    quantity.check("key", size)


def check_image(image):
    names.check_image("key", image)


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        # The longest name leaves room for that of a pod.
        (
            check_run,
            ["demo-2b", "a" * ROOM],
            ["Demo", "2b", "a_b", "a.b", "a-", "-a", "a\n", "ä", "a" * (ROOM + 1)],
        ),
        (
            check_size,
            ["1", "64Gi", "512Mi", "10G"],
            ["", "0", "64GB", "-1Gi", "1.5 Gi", "Gi"],
        ),
        (
            check_image,
            ["r/a:1", "r:5000/a:v1-x", "r/a@sha256:0f"],
            ["", "a", "r:5000/a", "r/a:", ":1", "r/a :1"],
        ),
    ],
)
def test_what_kubernetes_refuses_is_refused_and_quoted(check, taken, refused):
    for value in taken:
        check(value)
    for value in refused:
        with pytest.raises(errors.ConfigError) as error:
            check(value)
        assert repr(value) in str(error.value)


@given(name=st.text(), pods=st.integers(1, 10**6))
def test_the_name_that_an_error_proposes_is_taken(name, pods):
    jobs = {"slice": (1, pods)}
    with contextlib.suppress(errors.ConfigError):
        names.check_jobset_name(name, jobs)
        return
    with pytest.raises(errors.ConfigError) as error:
        names.check_jobset_name(name, jobs)
    names.check_jobset_name(str(error.value).rpartition("run_name=")[2], jobs)
