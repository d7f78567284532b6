import contextlib
import subprocess

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers import choices
from tests import shared_memory

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
    with pytest.raises(errors.ConfigError, match="give a tuple of URLs"):
        choices.Peers(known="http://10.0.0.7:8470")


def test_a_url_that_does_not_encrypt_is_refused_with_tls():
    assert choices.Peers(known=("https://a:1",), tls=TLS)
    with pytest.raises(errors.ConfigError, match="does not encrypt, and this run does"):
        choices.Peers(known=("http://a:1",), tls=TLS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 1, "every_minutes": 2}, "has every and every_minutes; give one of"),
        ({"every": 0}, r"Persistent\(every=0\): give an integer from 1"),
        ({"every": 1, "capture": "disk"}, r"capture='disk'\): give one of \['auto', "),
        ({"every_minutes": -1.0}, r"every_minutes=-1.0\): give a positive number"),
    ],
)
def test_a_persistent_tier_has_at_most_one_interval(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        choices.Persistent("/steps", **options)


def test_only_a_program_that_reads_needs_no_interval():
    tiers = [choices.Persistent("/steps")]
    with pytest.raises(errors.ConfigError, match="has no interval; give one of every="):
        choices.Chosen.from_choices(tiers)
    chosen = choices.Chosen.from_choices(tiers, read_only=True)
    assert chosen.persistent is tiers[0]


def test_a_persistent_tier_takes_a_policy_of_orbax():
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(5)
    tier = choices.Persistent("/steps", save_decision_policy=policy)
    assert tier.save_decision_policy is policy


def test_a_ram_disk_is_not_in_a_bucket():
    with pytest.raises(errors.ConfigError, match=r"gs://bucket/ram'\) is not a direct"):
        choices.Local("gs://bucket/ram")


class Count(int):
    """An integer that is not of type int."""


POLICY = ocp.training.preservation_policies.LatestN(3)
LOCAL, PERSISTENT = choices.Local("/ram/run"), choices.Persistent("/steps", every=1)
REFUSED = {
    "every": {
        (choices.Local, "/ram"): [0, -5, 2.5, 1.0, True, "5", None, float("nan")],
        (choices.Persistent, "/steps"): [0, -5, 2.5, 1.0, True, "5"],
    },
    "limit_bytes": {(choices.Local, "/ram"): [0, -1, 1e9, "64Gi", True]},
    "keep": {
        (choices.Local, "/ram"): [3, POLICY.should_preserve, "LatestN"],
        (choices.Persistent, "/steps"): [3, 0, "LatestN"],
    },
    "every_minutes": {
        (choices.Persistent, "/steps"): [
            0,
            -1.5,
            float("nan"),
            float("inf"),
            "20",
            True,
            [20],
        ],
    },
    "save_decision_policy": {(choices.Persistent, "/steps"): [5, "always"]},
    "directory": {
        (choices.Local,): ["", " ", None, 7, b"/ram", ["/ram"]],
        (choices.Persistent,): ["", " ", None, 7, b"/steps"],
    },
    "copies": {(choices.Peers,): [-1, 1.5, "2", None, True]},
    "port": {(choices.Peers,): [-1, 65536, "8470", None, 80.0]},
    "assume_data_parallelism": {(choices.Peers,): ["yes", 1, None]},
    "domain": {(choices.Peers,): [None, ["zone"], 3]},
    "domains": {(choices.Peers,): [None, "rack=r7", ["r7"]]},
    "interface": {(choices.Peers,): ["", 7]},
    "secret_file": {(choices.Peers,): ["", 7]},
    "max_bytes_per_sec": {(choices.Peers,): [0, -1, "1G", float("nan"), True]},
    "tls": {(choices.Peers,): ["a.pem", True]},
    "known": {(choices.Peers,): [None, 7]},
    "backups": {(choices.Peers,): [None, 7]},
}


@pytest.mark.parametrize(
    ("name", "tier", "value"),
    [
        (name, tier, value)
        for name, tiers in REFUSED.items()
        for tier, values in tiers.items()
        for value in values
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_given(name, tier, value):
    kind, *arguments = tier
    given = {name: value}
    if kind is choices.Persistent and name in ("keep", "directory"):
        given["every"] = 1
    with pytest.raises(errors.ConfigError) as caught:
        kind(*arguments, **given)
    message = str(caught.value)
    assert message.startswith(f"{kind.__name__}({name}={value!r})")
    assert "give " in message
    assert "\n" not in message


def test_right_settings_are_taken():
    assert type(choices.Local("/ram", every=Count(5)).every) is int
    assert choices.Local("/ram", keep=POLICY, limit_bytes=1).keep is POLICY
    assert choices.Persistent("/steps", every_minutes=0.5).every_minutes == 0.5
    assert choices.Peers(copies=0, port=65535, max_bytes_per_sec=1.5).copies == 0


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_of_tls_is_a_path(name):
    with pytest.raises(errors.ConfigError, match=rf"^TlsFiles\({name}=''\): give one"):
        choices.TlsFiles(**{**vars(TLS), name: ""})


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (
            LOCAL,
            r"Local\(\.\.\.\) is one tier; give a list of tiers, such as \[ec\.Local",
        ),
        (PERSISTENT, r"is one tier; give a list"),
        ("/dev/shm/run", "'/dev/shm/run' is not a list of tiers; give"),
        (None, "None is not a list of tiers"),
        ({LOCAL: 1}, "is not a list of tiers"),
        (
            [LOCAL, "gs://bucket"],
            "'gs://bucket', which is not a tier; give ec.Persistent",
        ),
        ([LOCAL, None], "None, which is not a tier"),
        ([PERSISTENT, [LOCAL]], "which is not a tier"),
        ([PERSISTENT, choices.Local], "Local'>, which is not a tier"),
        ([LOCAL, LOCAL], r"contains Local\(\.\.\.\) twice; give at most one"),
        ([], "tiers is empty; give ec.Persistent"),
        ([choices.Peers(), PERSISTENT], r"Peers\(\.\.\.\) without ec.Local"),
        (
            [LOCAL, choices.Persistent("/ram/run/steps", every=1)],
            r"Persistent\('/ram/run/steps'\) is inside Local\('/ram/run'\)",
        ),
        ([LOCAL, choices.Persistent("/ram/x/../run", every=1)], "is inside Local"),
    ],
)
def test_tiers_that_are_none_or_do_not_fit_are_refused(tiers, message):
    with pytest.raises(errors.ConfigError, match=message):
        choices.Chosen.from_choices(tiers)


def test_storage_beside_the_ram_directory_is_taken(tmp_path):
    stored = choices.Persistent("/ram/run-2", every=1)
    assert choices.Chosen.from_choices((LOCAL, stored)).persistent is stored
    (tmp_path / "link").symlink_to(tmp_path / "ram", target_is_directory=True)
    inside = choices.Persistent(tmp_path / "link" / "steps", every=1)
    with pytest.raises(errors.ConfigError, match="is inside Local"):
        choices.Chosen.from_choices([choices.Local(tmp_path / "ram"), inside])


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_ram_disk_that_is_not_in_memory_is_a_warning(where, tmp_path, caplog):
    with contextlib.ExitStack() as stack:
        path = tmp_path / "ram"
        if where == "memory":
            path = stack.enter_context(shared_memory.directory("choices"))
        stored = choices.Persistent(tmp_path / "steps", every=1)
        frontend.Checkpointer([choices.Local(path), stored]).close()
        kind = subprocess.check_output(["stat", "-f", "-c", "%T", path], text=True)
        # What storage alone needs for a while is no RAM disk.
        frontend.Checkpointer([stored]).close()
    warned = [each for each in caplog.messages if "not in memory" in each]
    if kind.strip() in ("tmpfs", "ramfs"):
        assert warned == []
    else:
        (warning,) = warned
        assert warning.startswith(f"{path} is on a file system of type")
        assert where == "disk"
