"""The programs in the docstrings of public names."""

import ast
import importlib
import inspect
import json
import operator
import re
import textwrap

import grain
import pyarrow as pa

import elastic_ckpt as ec
from tests import corpora
from tests.architecture import test_surface


def examples():
    """Of each public name: the indented blocks before the list of arguments."""
    for module in test_surface.PUBLIC:
        imported = importlib.import_module(module)
        # PyTorch is an extra.
        for name in sorted({*imported.__all__} - {"TorchLoader"}):
            doc = inspect.getdoc(getattr(imported, name)) or ""
            before = re.split(r"\n(?:Args|Attributes|Returns):", doc)[0]
            for block in re.findall(r"(?m)(?:^    .*\n|^\n)*^    .*\n?", before):
                yield f"{module}.{name}", textwrap.dedent(block)


def test_calls_in_docstrings_fit_their_signatures():
    found = 0
    for call in ast.walk(ast.parse("\n".join(program for _, program in examples()))):
        path = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if re.fullmatch(r"ec(\.\w+)+", path):
            named = {each.arg: None for each in call.keywords}
            target = operator.attrgetter(path.removeprefix("ec."))(ec)
            inspect.signature(target).bind(*call.args, **named)
            found += 1
    assert found > 15


def test_programs_in_docstrings_that_need_no_devices_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = pa.table({"text": ["one", "two"] * 100})
    corpora.write_table(tmp_path / "a1.parquet", table, group_rows=10)
    keys = {"grain_file_type": "parquet", "grain_train_files": "a1.parquet"}
    (tmp_path / "train.yml").write_text(json.dumps(keys | {"run_name": "a"}))
    stage = ec.data.from_config(keys, num_logical_shards=4)
    given = {"ec": ec, "grain": grain, "files": ["a1.parquet"], "decode": dict}
    given |= {"source": range(9), "short": stage, "long": stage, "step": 1, "shard": 2}
    runnable = ("sharded", "staged", "positional", "from_config", "Rng")
    found = [program for name, program in examples() if name.endswith(runnable)]
    assert len(found) == len(runnable)
    for program in found:
        exec(program, dict(given))
