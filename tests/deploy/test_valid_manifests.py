"""Each manifest that the verb writes passes the schemas of Kubernetes and JobSet.

The commands are in `tests/golden/manifests`. Below each stands how what it writes
differs from what the configuration alone makes, or the error.
"""

import contextlib
import difflib
import functools
import io
import itertools
import json
import re
import shlex
import subprocess

import pytest
import yaml

from elastic_ckpt.cli import main
from elastic_ckpt.deploy import machine
from elastic_ckpt.training import keys
from tests.conftest import GOLDEN
from tests.deploy import jobsets
from tests.deploy.jobsets import SHIPPED, TPU

TRANSCRIPTS = sorted((GOLDEN / "manifests").glob("*.txt"))
EXAMPLES = SHIPPED.parents[1] / "examples"
# Lists whose members have many fields of their own.
_DEEP = ("replicatedJobs", "containers", "initContainers")


def faults(documents):
    """The faults of a manifest by all schemas, which take long to import."""
    from tests.deploy import manifest_check

    return manifest_check.problems(list(documents))


@pytest.mark.slow
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_verb_writes_and_refuses_what_the_transcript_shows(
    path, golden, monkeypatch
):
    monkeypatch.chdir(SHIPPED)
    blocks = []
    for line in commands(path.read_text()):
        words = shlex.split(line.replace("\\\n", ""), comments=True)[1:]
        blocks.append("\n".join([line, *answer(words)]) if words else line)
    golden(path, "\n\n".join(blocks) + "\n")


def test_every_key_of_manifests_is_in_a_transcript():
    written = [path for path in TRANSCRIPTS if path.stem != "refused"]
    text = "".join(path.read_text() for path in written)
    used = set(re.findall(r"[ '\"]([a-z_]+)=", text))
    sections = ("deploy", "pods", "slurm")
    known = {key for key, (section, _) in keys.keys().items() if section in sections}
    assert not known - used


@pytest.mark.slow
def test_what_is_shipped_and_every_machine_is_valid():
    for path in (*SHIPPED.glob("*.yaml"), EXAMPLES / "jobset.yaml"):
        assert faults(yaml.safe_load_all(path.read_text())) == [], path
    for machine_type in ["", "n2-standard-16", *machine._GPUS]:
        hardware = "gpu" if machine_type in machine._GPUS else "cpu"
        chosen = [f"hardware={hardware}", f"machine_type={machine_type}", "topology="]
        assert faults(jobsets.documents(TPU, *chosen, "hosts=4")) == [], machine_type


def commands(text):
    """The remarks and commands, which go on after a backslash or in a quotation."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(("# ", "$ ")):
            whole = line
            while line[0] == "$" and (whole[-1] == "\\" or whole.count("'") % 2):
                whole += "\n" + next(lines)
            yield whole


def answer(words):
    """The lines below a command."""
    code, written, complaint = verb(words)
    if code:
        assert (code, written) == (1, "")
        return complaint.splitlines()
    before = verb_once(tuple(word for word in words if "=" not in word))
    if "--slurm" in words:
        subprocess.run(["bash", "-n"], input=written, text=True, check=True)
        compared = difflib.ndiff(before.splitlines(), written.splitlines())
        changes = [f"{line[0]}{line[2:]}" for line in compared if line[0] in "+-"]
    else:
        # All of it is written out, without anchors of YAML.
        assert not re.search(r"[&*]id\d", written)
        documents = list(yaml.load_all(written, yaml.CSafeLoader))
        assert faults(documents) == []
        old = values(yaml.load_all(before, yaml.CSafeLoader))
        changes = differences(old, values(documents))
    return [*(changes or ["the same"]), *complaint.splitlines()]


@functools.cache
def verb_once(words):
    code, written, complaint = verb(words)
    assert code == 0, complaint
    return written


def verb(words):
    """The exit status, output and errors of the verb."""
    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        code = main.main(["manifest", *words])
    return code, printed.getvalue(), complained.getvalue()


def differences(before, now):
    """The lines of two lists of objects that differ; an object that is gone is one."""
    both = {name: lines for name, lines in before.items() if name in now}
    old, new = (list(itertools.chain(*each.values())) for each in (both, now))
    return [
        *(f"-{name}" for name in before if name not in now),
        *(f"-{line}" for line in old if line not in new),
        *(f"+{line}" for line in new if line not in old),
    ]


def values(documents):
    """Each value of an object as a line, with its place, by the object's name."""
    return {
        f"{each['kind']} {each['metadata']['name']}": [
            line.replace("JobSet.spec.replicatedJobs.", "")
            .replace(".template.spec.template.", ".pods.")
            .replace(".template.spec.", ".job.")
            for line in values_of(each, each["kind"])
        ]
        for each in documents
    }


def values_of(value, place):
    if place == "ConfigMap.data.config.yml":
        # The pods read it as it was given: test_manifest.py.
        return
    if isinstance(value, dict):
        for key, below in value.items():
            yield from values_of(below, f"{place}.{key}")
    elif place.endswith(_DEEP):
        for member in value:
            yield from values_of(member, f"{place}.{member['name']}")
    elif isinstance(value, list) and isinstance(value[0], dict):
        yield from (f"{place}: {json.dumps(member)}" for member in value)
    elif isinstance(value, str) and "\n" in value:
        yield from (f"{place}: {line}" for line in value.splitlines())
    else:
        yield f"{place}: {json.dumps(value)}"
