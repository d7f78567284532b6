import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import names

JOBS = {"slice": (2, 16)}


def test_a_run_of_lower_case_words_names_the_jobset():
    names.check_jobset_name("demo-2b", JOBS)


@pytest.mark.parametrize("name", ["Demo", "2b", "a_b", "a.b", "a-", "-a", "a\n", "ä"])
def test_a_name_that_kubernetes_refuses_is_refused(name):
    with pytest.raises(errors.ConfigError, match=re.escape(repr(name))):
        names.check_jobset_name(name, JOBS)


def test_the_longest_name_leaves_room_for_that_of_a_pod():
    room = 63 - len("-slice-1-15")
    names.check_jobset_name("a" * room, JOBS)
    with pytest.raises(errors.ConfigError, match=f"at most {room} letters"):
        names.check_jobset_name("a" * (room + 1), JOBS)


@given(name=st.text(), pods=st.integers(1, 10**6))
def test_the_name_that_an_error_proposes_is_taken(name, pods):
    jobs = {"slice": (1, pods)}
    try:
        names.check_jobset_name(name, jobs)
    except errors.ConfigError as error:
        proposed = str(error).rpartition("run_name=")[2]
        names.check_jobset_name(proposed, jobs)


@pytest.mark.parametrize("size", ["1", "64Gi", "512Mi", "10G"])
def test_amounts_of_memory_are_those_of_kubernetes(size):
    names.check_size("key", size)


@pytest.mark.parametrize("size", ["", "0", "64GB", "-1Gi", "1.5 Gi", "Gi"])
def test_what_is_no_amount_is_refused(size):
    with pytest.raises(errors.ConfigError, match="key="):
        names.check_size("key", size)


@pytest.mark.parametrize("image", ["r/a:1", "r:5000/a:v1-x", "r/a@sha256:0f"])
def test_an_image_names_its_version(image):
    names.check_image("key", image)


@pytest.mark.parametrize("image", ["", "a", "r:5000/a", "r/a:", ":1", "r/a :1"])
def test_an_image_without_a_version_is_refused(image):
    with pytest.raises(errors.ConfigError, match="key="):
        names.check_image("key", image)
