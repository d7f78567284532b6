import os
import pathlib
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.tiers.peers import agent, node_record, secret
from tests import runs
from tests.tiers import served, served_nodes

PART = "/v1/hosts/0/30-0/data/part"
VERB = ("elastic_ckpt.cli.main", "agent")
# A program that starts an agent, and prints its address.
PARENT = (
    "import subprocess, sys\n"
    "program = 'elastic_ckpt.tiers.peers.agent_command'\n"
    "command = [sys.executable, '-m', program, sys.argv[1], '--until-stdin-closes']\n"
    "started = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
    "started.wait()\n"
)


@pytest.fixture
def root(tmp_path):
    served.save(tmp_path / "root", 30, {"data/part": b"part"})
    return tmp_path / "root"


def test_the_verb_serves_a_directory_and_says_where(root):
    with served.agent_process(root, verb=VERB) as (process, url):
        known = secret.read_or_create(root)
        assert served.ask(url, PART, known) == (200, b"part")
        announced = agent.find(root)
        assert (announced.url, announced.pid) == (url, process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(root, number):
    with served.agent_process(root, verb=VERB) as (process, _):
        process.send_signal(number)
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert agent.find(root) is None


def test_the_end_of_its_standard_input_ends_it_cleanly(root):
    with served.agent_process(root) as (process, _):
        process.stdin.close()
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


def test_without_the_option_it_outlives_its_standard_input(root):
    command = runs.command("agent", root)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().split()[-1]
        assert served.ask(url, PART, secret.read_or_create(root))[0] == 200
        process.terminate()
        assert process.wait() == 0


def test_one_that_was_killed_is_followed_by_another_with_the_same_secret(root):
    with served.agent_process(root) as (process, _):
        known = secret.read_or_create(root)
        process.kill()
        process.wait()
    assert agent.find(root) is not None
    with served.agent_process(root) as (_, url):
        assert served.ask(url, PART, known)[0] == 200


def test_a_second_agent_ends_with_an_error_that_names_the_first(root):
    with served.agent_process(root) as (_, url):
        for arguments in (
            runs.command("agent", root),
            [sys.executable, "-m", "elastic_ckpt.tiers.peers.agent_command", str(root)],
        ):
            ended = subprocess.run(
                arguments, capture_output=True, text=True, check=False
            )
            assert ended.returncode == 1
            assert "Traceback" not in ended.stderr
            assert f"another agent serves {root}" in ended.stderr
            assert url in ended.stderr


@pytest.mark.parametrize("is_file", [False, True])
def test_a_directory_that_does_not_exist_is_refused_and_not_made(tmp_path, is_file):
    root = tmp_path / "none"
    if is_file:
        root.write_text("")
    output = runs.verb("agent", root, code=1)
    assert f"{root}: no such directory; name the RAM disk of a run" in output
    assert not root.is_dir()


def test_the_secret_is_nowhere_but_in_its_file(root, tmp_path):
    (tmp_path / "mounted").write_text("given-by-the-cluster")
    with served.agent_process(
        root, "--secret-file", tmp_path / "mounted", verb=VERB
    ) as (process, url):
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


def test_a_file_without_a_secret_is_named_and_not_shown(root, tmp_path):
    (tmp_path / "mounted").write_text("too short")
    output = runs.verb("agent", root, "--secret-file", tmp_path / "mounted", code=1)
    assert f"{tmp_path / 'mounted'} holds no secret" in output
    assert "too short" not in output
    output = runs.verb("agent", root, "--secret-file", tmp_path / "none", code=1)
    assert "no such file" in output


def test_a_port_beyond_the_last_is_refused(root):
    ended = runs.cli("agent", root, "--port", 2**16)
    assert ended.returncode == 2
    assert "argument --port: '65536' is not a port" in ended.stderr


def test_an_agent_imports_no_jax():
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


def test_the_agent_of_a_node_publishes_domains_and_serves_runs_that_begin(tmp_path):
    arguments = ("--node", "--domains", "rack=r7;zone=z")
    with served.agent_process(tmp_path, *arguments, verb=VERB) as (process, at):
        assert at == "127.0.0.1"
        root = served_nodes.save_run(tmp_path)
        url = agent.wait_for(root).url
        assert node_record.find(root).domains == {"rack": "r7", "zone": "z"}
        assert served.ask(url, PART, secret.read_or_create(root)) == (200, b"part")
        process.terminate()
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert node_record.find(root) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--domains", "rack=r7"], "--domains is for the agent of a node; add --node"),
        (["--node", "--domains", "r7"], "is not `kind=name`"),
    ],
)
def test_options_that_do_not_go_together_are_errors(root, arguments, message):
    assert message in runs.verb("agent", root, *arguments, code=1)
