"""Prose is ordinary technical English, and names are nouns of the field.

This keeps the worst habits out of docstrings, comments, messages and pages, and names
that explain nothing, or that were deleted, out of the code.
"""

import ast
import functools
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ["benchmarks", "elastic_ckpt", "sidecar", "tests"]

# A habit, and the rule that it breaks.
HABITS = {
    r"\bhears?\b|\blistens\b": "code does not hear: it receives, or is called",
    r"\btold\b|\btells?\b|\bsays?\b|\bsaid\b": "code does not speak: it reports, names",
    r"\bknows\b|\bwants?\b|\bforgets?\b|\bremembers?\b|\bnotices?\b": (
        "code has no mind: it holds, requires, discards, stores, detects"
    ),
    r"\bmeets\b|\bmet\b": "code does not meet: boxes overlap, hosts synchronise",
    r"\bwhoever\b|\bwhom\b|\bnobody\b|\banybody\b|\bsomebody\b": (
        "name the actor: the caller, the reader, another process"
    ),
    r"\b[Ll]ets? go of\b": "memory is freed, hosts are released",
    r"(?:^|[.;:] )(?:What|Who|Whatever)\b|^Where\b": (
        "begin with the subject, not with What, Who or Where"
    ),
    r"(?:^|[.;] )Of (?!which)": "do not invert: put the subject first",
    r"\bcannot be meant\b|\bfor to\b|\bsuch as are\b|\bcomes? to (?:some|no)thing\b": (
        "say it as a colleague would"
    ),
    r"^Has (?:`|\w+s\b)": "begin with the verb of what is done: Calls, Starts",
    r"\bof its own\b|\bof their own\b": "separate, its own ..., or nothing",
}
NAMES = {
    "RunCheckpointer",
    "TieredRunCheckpointer",
    "_orbax",
    "ahead",
    "described",
    "exchange",
    "first_contact",
    "found",
    "joining",
    "letters",
    "of",
    "places",
    "told",
    "where",
}


def files(suffix):
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob(suffix))]
    # This file lists the habits.
    return [path for path in paths if path != pathlib.Path(__file__)]


def relative(path):
    return path.relative_to(ROOT).as_posix()


def texts(path):
    """The docstrings, comments and messages of a module, with their lines."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        # A string without a space is a key or a name.
        if isinstance(node, ast.Constant) and " " in str(node.value):
            yield node.lineno, str(node.value)
    comment, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield last, " ".join(comment)
                comment = []
            comment.append(token.string.lstrip("# "))
            last = token.start[0]
    yield last, " ".join(comment)


@functools.cache
def prose():
    """The sentences of all modules, with their files and lines."""
    return [
        (relative(path), line, sentence)
        for path in files("*.py")
        for line, text in texts(path)
        for sentence in sentences(text)
    ]


def sentences(text):
    """Paragraphs, and the entries of a docstring's sections, on one line each."""
    parts = re.split(r"\n\s*\n|\n\s*[*|-] |\n\s+(?=\*{0,2}\w+: )", text)
    return [" ".join(part.split()) for part in parts]


def defined(path):
    """The names that a module defines, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr.lstrip("_")


@pytest.mark.parametrize("habit", HABITS)
def test_docstrings_comments_and_messages_are_plain(habit):
    hits = [
        f"{path}:{line}: {sentence}"
        for path, line, sentence in prose()
        if re.search(habit, sentence)
    ]
    assert not hits, "\n".join([HABITS[habit], *hits])


@pytest.mark.parametrize("habit", HABITS)
def test_pages_are_plain(habit):
    hits = [
        f"{relative(path)}: {sentence}"
        for path in [*sorted(ROOT.glob("*.md")), *files("*.md")]
        for sentence in sentences(path.read_text())
        if re.search(habit, sentence)
    ]
    assert not hits, "\n".join([HABITS[habit], *hits])


def test_names_explain_themselves():
    hits = [
        f"{relative(path)}:{line}: {name}"
        for path in files("*.py")
        for line, name in [(1, path.stem), *defined(path)]
        if name in NAMES
    ]
    assert not hits, "\n".join(hits)
