import os
import pathlib
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.tiers.peers import agent, secret
from tests import runs
from tests.tiers import served
from tests.tiers.served import PART

# A program that starts an agent, and prints its address.
PARENT = (
    "import subprocess, sys\n"
    "command = [sys.executable, '-m', 'elastic_ckpt.cli.main', 'agent']\n"
    "command += [sys.argv[1], '--until-stdin-closes']\n"
    "started = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
    "started.wait()\n"
)


@pytest.fixture
def root(tmp_path):
    served.save(tmp_path / "root", 30, {"data/part": b"part"})
    return tmp_path / "root"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_verb_serves_a_directory_until_a_signal_ends_it(root, number):
    with served.agent_process(root) as (process, url):
        known = secret.read_or_create(root)
        assert served.ask(url, PART, known) == (200, b"part")
        announced = agent.find(root)
        assert (announced.url, announced.pid) == (url, process.pid)
        process.send_signal(number)
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert agent.find(root) is None


def test_it_ends_with_a_parent_that_is_killed(root):
    command = [sys.executable, "-c", PARENT, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline().startswith("serving ")
        parent.kill()
        # The agent has it open, too, until it ends.
        assert parent.stdout.read() == ""
    assert agent.find(root) is None


def test_second_agent_is_refused_until_the_first_is_killed(root):
    with served.agent_process(root) as (process, url):
        known = secret.read_or_create(root)
        output = runs.verb("agent", root, code=1)
        assert f"another agent already serves {root}" in output
        assert url in output
        process.kill()
        process.wait()
    assert agent.find(root) is not None
    with served.agent_process(root) as (_, url):
        assert served.ask(url, PART, known)[0] == 200


def test_secret_is_nowhere_but_in_its_file(root, tmp_path):
    (tmp_path / "mounted").write_text("given-by-the-cluster")
    with served.agent_process(root, "--secret-file", tmp_path / "mounted") as (
        process,
        url,
    ):
        assert served.ask(url, PART, "given-by-the-cluster")[0] == 200
        assert served.ask(url, PART, "given-by-the-cluster-")[0] == 401
        assert served.ask(url, "/none", "given-by-the-cluster")[0] == 404
        served.ask(url, PART, "given-by-the-cluster", "X\0: given-by-the-cluster")
        of_process = pathlib.Path("/proc", str(process.pid))
        visible = [of_process / "cmdline", of_process / "environ", *root.iterdir()]
        for file in visible:
            assert not file.is_file() or b"given-by" not in file.read_bytes()
        process.terminate()
        assert "given-by" not in process.stdout.read() + process.stderr.read()


def test_agent_imports_no_jax():
    program = (
        "import sys, elastic_ckpt.tiers.peers.agent\n"
        "print({'jax', 'numpy', 'tensorstore', 'orbax'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert ended.stdout == "set()\n"


def test_agent_of_a_node_publishes_domains_and_serves_runs_that_begin(tmp_path):
    arguments = ("--node", "--domains", "rack=r7;zone=z")
    with served.agent_process(tmp_path, *arguments) as (process, at):
        assert at.startswith("http://127.0.0.1:")
        root = served.save_run(tmp_path)
        url = agent.wait_for(root).url
        assert agent.domains(root) == {"rack": "r7", "zone": "z"}
        assert served.ask(url, PART, secret.read_or_create(root)) == (200, b"part")
        process.terminate()
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert agent.find(root) is None
    assert agent.domains(root) == {}
