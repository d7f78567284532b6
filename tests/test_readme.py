"""Every block of the README and of the first run works as it is written."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import pages, shared_memory

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = ROOT / "docs/pages"
FIRST_RUN = (GUIDES / "start/install.md").read_text()
OWN_DATA = (GUIDES / "guides/own-data.md").read_text()
# Beside load the demo may end before the slice that returned is used again.
SLICE_IS_BACK = "{return_slice: 1, at_step: 60}"
SOONER = "{return_slice: 1, at_step: 35}"


@pytest.fixture
def ram():
    with shared_memory.directory("demo") as directory:
        yield directory


def commands(page):
    """The lines of all shell blocks, but for the tests themselves: these run this."""
    lines = "".join(pages.blocks(page, "sh")).splitlines()
    return [line for line in lines if "pytest" not in line]


@pytest.mark.slow
def test_its_program_continues_when_it_is_run_again(tmp_path):
    (program,) = pages.blocks(README)
    steps = []
    for _ in range(2):
        printed = pages.run(program + "\nprint(step, state['tokens_seen'])", tmp_path)
        step, tokens_seen = map(int, printed.split())
        assert tokens_seen == step * 16 * 256
        steps.append(step)
    # The second time it continues from what is in RAM.
    assert steps == [10, 20]


@pytest.mark.slow
def test_shards_of_one_s_own_are_elastic_as_the_guide_writes_them(tmp_path):
    program = pages.blocks(OWN_DATA)[0] + (
        "from elastic_ckpt.data import rows\n"
        "def ids(num_hosts):\n"
        "    places = rows.in_order(num_hosts, 24)\n"
        "    hosts = [data.host_batches(place) for place in places]\n"
        "    parts = [[next(host)['inputs'] for host in hosts] for _ in range(9)]\n"
        "    return np.concatenate(sum(parts, [])).tolist()\n"
        "assert ids(1) == ids(2) == ids(6)\n"
        "print(len(ids(3)))\n"
    )
    assert pages.run(program, tmp_path) == "216\n"


@pytest.mark.night
def test_every_command_runs_as_written_on_a_fresh_clone_with_a_bare_python(
    tmp_path, ram
):
    clone, bare = tmp_path / "clone", tmp_path / "bare"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # A developer's own demo may be in /dev/shm.
    demo = clone / "configs/demo_cpu.yml"
    demo_text = demo.read_text().replace(": /dev/shm\n", f": {ram}\n")
    assert SLICE_IS_BACK in demo_text
    demo.write_text(demo_text.replace(SLICE_IS_BACK, SOONER))
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "VIRTUAL_ENV", "PYTEST", "PYTHON", "JAX_"))
    }
    environment["PATH"] = f"{bare}/bin:{os.environ['PATH']}"

    def run(line):
        ended = subprocess.run(
            line,
            shell=True,
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, line + ended.stdout + ended.stderr
        return ended.stdout

    # The page begins with the commands of the README.
    lines = commands(FIRST_RUN)
    assert set(commands(README)) <= set(lines)
    output = "".join(map(run, lines))
    assert "demo_cpu: to step 150 on 4 hosts, 4 slices, 4 devices" in output
    assert "world 2 starts on slices 0, 2, 3" in output
    assert "world 3 starts on slices 0, 1, 2, 3" in output
    assert "190 steps took 4,560 rows" in output
    assert "hosts: 4 -> 3 -> 4 -> 2" in output
    assert output.count("PASSED") == 2
    assert "60 steps took 1,440 rows; hosts: 4 -> 3" in output
    inspected = run("uv run elastic-ckpt inspect runs/demo_cpu --json")
    # The last step of each start is there; others may have been replaced by newer ones.
    assert {150, 190} <= set(json.loads(inspected)["known"])
    for name in ("demo_cpu", "demo_packed"):
        verified = run(f"uv run elastic-ckpt verify --strict runs/{name}")
        assert verified.endswith("\nPASSED: every copy matches what was saved\n")
    # Neither the lock file nor a run shows up as something to commit.
    assert run("git status --porcelain") == " M configs/demo_cpu.yml\n"
