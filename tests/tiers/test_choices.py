"""Settings of tiers that are taken; those that are refused are in tests/refusals."""

import subprocess

from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices
from tests import shared_memory


def test_urls_as_agents_print_them_are_known():
    tls = choices.TlsFiles(certificate="a.pem", key="a.pem", authority="b.pem")
    encrypted = "https://h-1.local:65535/v1/a%2Fb"
    choices.Peers(known=(encrypted,), tls=tls)
    for url in (encrypted, "http://agent/v1/run-7", "http://[fd00::7]:8470/v1/run"):
        assert choices.Peers(known=(url,)).known == (url,)


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
