import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import choices

TLS = choices.TlsFiles(certificate="a.pem", key="a.pem", authority="b.pem")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:8470",
        "https://host-1.cluster.local:65535",
        "http://[fd00::7]:8470",
        "http://agent",
    ],
)
def test_urls_as_agents_print_them_are_known(url):
    assert choices.Peers(known=(url,)).known == (url,)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.7:8470",
        "10.0.0.7",
        "http://",
        "http:///v1",
        "http://:8470",
        "http://a:0",
        "http://a:65536",
        "http://a:port",
        "http://a:8470/v1/steps",
        "http://a:8470/",
        "http://a:8470?secret=x",
        "http://user:word@a:8470",
        "http://a b:8470",
        "http://a:8470\n",
        " http://a:8470",
        "HTTP://a:8470",
        "ftp://a:8470",
        "file:///dev/shm/run",
        "http://[fd00::7:8470",
        b"http://a:8470",
        None,
        8470,
    ],
)
def test_a_malformed_url_is_refused_when_it_is_given(url):
    with pytest.raises(errors.ConfigError, match="is not the URL of an agent; give it"):
        choices.Peers(known=("http://10.0.0.7:8470", url))


def test_one_string_is_no_list_of_urls():
    with pytest.raises(errors.ConfigError, match="is one string; give a tuple"):
        choices.Peers(known="http://10.0.0.7:8470")


def test_a_url_that_does_not_encrypt_is_refused_with_tls():
    assert choices.Peers(known=("https://a:1",), tls=TLS)
    with pytest.raises(errors.ConfigError, match="does not encrypt, and this run does"):
        choices.Peers(known=("http://a:1",), tls=TLS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no interval; give one of every=STEPS"),
        ({"every": 1, "every_minutes": 2}, "has every, every_minutes; give one of"),
        ({"every": 0}, r"Persistent\(every=0\): give a positive number"),
        ({"every_minutes": -1.0}, r"every_minutes=-1.0\): give a positive number"),
    ],
)
def test_a_persistent_tier_has_exactly_one_interval(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        choices.Persistent("/steps", **options)


def test_a_persistent_tier_takes_a_policy_of_orbax():
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(5)
    tier = choices.Persistent("/steps", save_decision_policy=policy)
    assert tier.save_decision_policy is policy


def test_a_ram_disk_is_not_in_a_bucket():
    with pytest.raises(errors.ConfigError, match="not at gs://bucket/ram; set Local"):
        choices.Local("gs://bucket/ram")
