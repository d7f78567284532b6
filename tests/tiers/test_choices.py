"""Settings of tiers that are taken; those that are refused are in tests/refusals."""

import subprocess

from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices
from tests import shared_memory

POLICY = ocp.training.preservation_policies.LatestN(3)


def test_right_settings_are_taken():
    assert choices.Local("/ram", keep=POLICY, limit_bytes=1).keep is POLICY
    assert choices.Persistent("/steps", every_minutes=0.5).every_minutes == 0.5
    assert choices.Peers(copies=0, port=65535, max_bytes_per_sec=1.5).copies == 0
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(5)
    tier = choices.Persistent("/steps", save_decision_policy=policy)
    assert tier.save_decision_policy is policy
    # Only a program that reads needs no interval.
    reads = choices.Persistent("/steps")
    assert choices.Chosen.from_choices([reads], read_only=True).persistent is reads
    beside = choices.Persistent("/ram/run-2", every=1)
    chosen = choices.Chosen.from_choices((choices.Local("/ram/run"), beside))
    assert chosen.persistent is beside
    tls = choices.TlsFiles(certificate="a.pem", key="a.pem", authority="b.pem")
    assert choices.Peers(known=("https://a:1/v1/r",), tls=tls)


def test_urls_as_agents_print_them_are_known():
    for url in (
        "http://10.0.0.7:8470/v1/run",
        "https://h-1.local:65535/v1/a%2Fb",
        "http://agent/v1/run-7",
    ):
        assert choices.Peers(known=(url,)).known == (url,)
    assert choices.Peers(known=("http://[fd00::7]:8470/v1/run",)).known


def test_a_ram_disk_that_is_not_in_memory_is_a_warning(tmp_path, caplog):
    stored = choices.Persistent(tmp_path / "steps", every=1)
    with shared_memory.directory("choices") as memory:
        for path in (memory, tmp_path / "ram"):
            frontend.Checkpointer([choices.Local(path), stored]).close()
    # What storage alone needs for a while is no RAM disk.
    frontend.Checkpointer([stored]).close()
    warned = [each for each in caplog.messages if "not in memory" in each]
    disk = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True)
    assert len(warned) == (disk.strip() not in ("tmpfs", "ramfs"))
    for warning in warned:
        assert warning.startswith(f"{tmp_path / 'ram'} is on a file system of type")
