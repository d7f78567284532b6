"""The house rules that a linter cannot know."""

import ast
import functools
import pathlib

import pytest

from tests.mutants import faults

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(
    path for room in ("elastic_ckpt", "sidecar") for path in (ROOT / room).rglob("*.py")
)
ONLY_READER_OF_PROCESS_INDEX = "elastic_ckpt/core/topology.py"
ONLY_WRITER_OF_FILES = "elastic_ckpt/core/storage.py"


def relative(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def functions(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def in_every_file(check):
    """A test that calls `check` for each source, and names all that break the rule."""

    def test():
        broken = []
        for path in SOURCES:
            try:
                check(path)
            except AssertionError as error:
                broken.append(f"{relative(path)}: {error}")
        assert not broken, "\n".join(broken)

    return test


@in_every_file
def test_everything_public_is_documented_and_everything_is_annotated(source):
    tree = tree_of(source)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.name.startswith("_") or ast.get_docstring(node), node.name
    for function in functions(source):
        arguments = function.args
        named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        for argument in named:
            bare = argument.annotation is None
            assert not bare or argument.arg in ("self", "cls"), function.name
        assert function.returns or function.name == "__init__", function.name


@in_every_file
def test_one_module_reads_process_numbers(source):
    if relative(source) != ONLY_READER_OF_PROCESS_INDEX:
        assert "process_index(" not in source.read_text()
        assert "process_count(" not in source.read_text()


@in_every_file
def test_one_module_writes_files(source):
    if relative(source) == ONLY_WRITER_OF_FILES:
        return
    writers = ("write_text", "write_bytes", "mkdir", "unlink", "rmtree", "os.replace")
    text = source.read_text()
    assert not [writer for writer in writers if f"{writer}(" in text]


@in_every_file
def test_nothing_is_unpickled_and_nothing_is_evaluated(source):
    text = source.read_text()
    if relative(source) == "elastic_ckpt/elastic/executables.py":
        # Executables of this run, after their MAC: tests/elastic/test_executables.py.
        text = text.replace("pickle.loads(payload)", "", 1)
    if relative(source) == "elastic_ckpt/data/worker.py":
        # A host and its worker processes, through pipes that only they have.
        for call in ("load(given)", "load(self._batches)", "loads(content)"):
            text = text.replace(f"pickle.{call}", "", 1)
    for dangerous in ("pickle.load", "eval(", "exec(", "yaml.load(", "np.load("):
        assert dangerous not in text.replace("value_and_grad(", "")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_the_list_is_still_one(fault):
    compile(fault.applied(), fault.path, "exec")
