"""`configs/deploy/slurm/job.sh` with other values above its line."""

import re
import shlex

from tests.deploy import overlays


def text(*, ram, program=None, is_elastic=True, nodes=2, tasks=1, **values):
    """The script, for fake nodes.

    Args:
      ram: the RAM disk of all nodes.
      program: what runs in place of `elastic-ckpt train`.
      is_elastic: whether each node has a supervisor.
      nodes: their number.
      tasks: on each node.
      **values: of further variables.
    """
    whole = (overlays.DEPLOY / "slurm/job.sh").read_text()
    script, line, rest = whole.partition("\n# -----")
    given = {name: shlex.quote(str(value)) for name, value in values.items()}
    given["ram_disk"] = shlex.quote(str(ram))
    if program is not None:
        given["program"] = f"({shlex.join(program)})"
    if not is_elastic:
        given |= {r"program\+": "()", "is_elastic": ""}
    given |= {"#SBATCH --nodes": nodes, "#SBATCH --ntasks-per-node": tasks}
    for name, value in given.items():
        written = re.compile(rf"^({name})=.*$", re.MULTILINE)
        script, found = written.subn(lambda match, v=value: f"{match[1]}={v}", script)
        assert found == 1, name
    return script + line + rest
