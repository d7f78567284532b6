"""Renders chat templates, which are programs that come with models, in Jinja's sandbox.

Jinja's sandbox keeps a template from reaching Python. It bounds neither time nor
memory: two nested loops of `range(100000)`, or a string that is doubled sixty times,
never end. Here each rendering has a budget of operations instead. Loops, macros and
blocks pay for each time that they run, by their size; operators, filters, tests and
methods pay for the values that they read and make, those that can grow a value before
they do. A template can call nothing that does not pay.

The budget counts operations, not time: a template and its conversation are accepted, or
refused, on every machine alike, in any thread, and nothing goes on running.

What is paid for is put into the tree of the parsed template (`_Pays`), or stands in the
hooks of the sandbox (`_Environment`).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes, parser, runtime, sandbox, utils, visitor

# The operations of one rendering: about a second, and at most some hundred megabytes.
MAX_OPERATIONS = 2**20
# The characters of a rendered conversation, and of a template.
MAX_CHARACTERS = 2**23
MAX_TEMPLATE_CHARACTERS = 2**20

# Around what `{% generation %}` blocks render. No text has these halves of pairs.
BEGIN_GENERATED, END_GENERATED = "\ud800", "\udbff"

# Reading or copying so many characters, or items of a list, is one operation.
_CHARACTERS = 32
# The largest whole number, in bits, and the longest text that becomes one.
_MAX_BITS = 4096
_MAX_DIGITS = 1000
_MAX_INDENT = 16
# How deeply lists and dicts are in each other.
_MAX_DEPTH = 200

# The name of the budget among the variables of a template, which is no identifier.
_BUDGET = "the budget"
# Filters of ours that are put into a tree.
_SPEND, _EACH, _SEEN = "spend ", "each ", "seen "
_CONCAT, _CUT, _KEY = "concat ", "cut ", "key "


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float forceescape format"
    " groupby indent int items join last length list lower map max min reject"
    " rejectattr replace reverse round safe select selectattr sort string title trim"
    " unique upper"
)
# Filters and tests that read no more of a value than what it is, or than its items one
# by one; others compare or print all that is in it.
_SHALLOW_FILTERS = _names(
    "abs count d default first float int items last length list map reject rejectattr"
    " reverse round select selectattr"
)
_SHALLOW_TESTS = _names(
    "boolean callable defined divisibleby escaped even false filter float integer"
    " iterable mapping none number odd sameas sequence string test true undefined"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold count endswith find format index isalnum isalpha isascii"
        " isdecimal isdigit islower isnumeric isspace istitle isupper join lower lstrip"
        " partition removeprefix removesuffix replace rfind rindex rpartition rsplit"
        " rstrip split splitlines startswith strip swapcase title upper"
    ),
    list: _names("copy count index"),
    tuple: _names("count index"),
    dict: _names("copy get items keys values"),
}


class ExceededError(Exception):
    """A rendering has used up its budget."""


class RefusedError(jinja2.TemplateError):
    """A template refuses a conversation by `raise_exception`."""


class Template:
    """A template that is ready to be rendered, in any thread.

    Args:
      text: of the template.

    Attributes:
      has_generation: whether it has `{% generation %}` blocks.
      names: of the variables that it reads, and of those that it sets.

    Raises:
      jinja2.TemplateError: if it is no template, or uses what the sandbox lacks.
      RecursionError: if it is nested too deeply.
    """

    def __init__(self, text: str) -> None:
        environment = _environment()
        tree = environment.parse(text)
        self.has_generation = tree.find(nodes.ExtensionAttribute) is not None
        self.names = frozenset(name.name for name in tree.find_all(nodes.Name))
        self._template = environment.from_string(tree)

    def render(self, variables: Mapping[str, Any], *, date: str = "") -> str:
        """What the template makes of variables, with marks around generated text.

        Args:
          variables: strings, numbers, lists and dicts; they are not changed.
          date: the date, `YYYY-MM-DD`, for `strftime_now`; without it, that is refused.

        Raises:
          ExceededError: if it takes more operations, or has more characters, than the
            limits.
          RefusedError: if the template calls `raise_exception`.
          Exception: any other, of the template.
        """
        budget = _Budget(MAX_OPERATIONS, date)
        context = self._template.new_context({**variables, _BUDGET: budget})
        pieces, num_characters = [], 0
        for piece in self._template.root_render_func(context):
            pieces.append(piece)
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                raise ExceededError(f"it has more than {MAX_CHARACTERS:,} characters")
        return "".join(pieces)


class _Budget:
    """The operations that a rendering has left, and the date that it is told."""

    def __init__(self, operations: int, date: str) -> None:
        self.left = operations
        self.date = date

    def spend(self, operations: int) -> None:
        self.left -= operations
        if self.left < 0:
            raise ExceededError(
                f"it takes more than {MAX_OPERATIONS:,} operations: it loops, or"
                " repeats text, without end"
            )

    def spend_deep(self, value: Any) -> int:
        """Pays for all that is in a value, as often as it is in it.

        Returns:
          How deeply it is nested: 1 for a text or a number, 2 for a list of them.

        Raises:
          ExceededError: also if dicts and lists are nested too deeply. Python takes the
            hash of a tuple by recursion without a limit, for which a stack may be too
            short.
        """
        if type(value) is str:
            self.spend(1 + len(value) // _CHARACTERS)
            return 1
        level, operations, depth = [value], 0, 0
        while level:
            deeper: list[Any] = []
            for each in level:
                operations += _size(each)
                if operations + len(deeper) > self.left:
                    self.spend(operations + len(deeper))
                if isinstance(each, dict):
                    deeper += each.keys()
                    deeper += each.values()
                elif isinstance(each, _LISTS):
                    deeper += each
            level, depth = deeper, depth + 1
            if depth > _MAX_DEPTH:
                raise ExceededError(f"it nests more than {_MAX_DEPTH} lists")
        self.spend(operations)
        return depth

    def spend_key(self, value: Any) -> None:
        """Pays for the hash of a value."""
        if isinstance(value, tuple):
            self.spend_deep(value)


_SIZED = (str, list, tuple, dict, range)
_LISTS = (list, tuple)


def _size(value: Any) -> int:
    # The operations that it takes to read a value, without what is in it.
    if isinstance(value, _SIZED):
        return 1 + len(value) // _CHARACTERS
    if type(value) is int:
        return 1 + value.bit_length() // 64
    return 1


def _budget(context: runtime.Context) -> _Budget:
    budget: _Budget = context.parent[_BUDGET]
    return budget


# What is put into the tree of a template.


class _Pays(visitor.NodeTransformer):
    """Puts what pays for loops, macros, blocks and comparisons into a tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        cost = _cost(node.body) + (_cost([node.test]) if node.test else 0)
        self.generic_visit(node)
        node.iter = _filter(node.iter, _EACH, nodes.Const(cost))
        if node.recursive:
            node.body.insert(0, _spending(cost))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        cost = _cost(node.body)
        self.generic_visit(node)
        node.body.insert(0, _spending(cost))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _variable(node.expr, _SEEN)
        for operand in node.ops:
            operand.expr = _variable(operand.expr, _SEEN)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter(node, _CUT)
        node.arg = _variable(node.arg, _KEY)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _variable(node.key, _KEY)
        return node

    def visit_Include(self, node: nodes.Stmt) -> nodes.Node:
        raise jinja2.TemplateAssertionError(
            "a chat template is one text, which includes no other", node.lineno
        )

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _cost(body: Iterable[nodes.Node]) -> int:
    # The operations of running a body once, without what it repeats or calls.
    cost, held = 1, list(body)
    while held:
        node = held.pop()
        cost += 1
        if isinstance(node, nodes.TemplateData):
            cost += len(node.data) // _CHARACTERS
        held += node.iter_child_nodes()
    return cost


def _spending(cost: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(cost), _SPEND))


def _variable(node: nodes.Expr, name: str) -> nodes.Expr:
    # A constant is part of the template, whose size is limited.
    return node if isinstance(node, nodes.Const) else _filter(node, name)


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    node = cast(nodes.Expr, node)
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _passing(pay: Callable[[_Budget, Any], object]) -> Callable[..., Any]:
    """A filter that pays for a value and returns it."""

    @jinja2.pass_context
    def paid(context: runtime.Context, value: Any) -> Any:
        pay(_budget(context), value)
        return value

    return paid


@jinja2.pass_context
def _each(context: runtime.Context, items: Any, cost: int) -> Any:
    # Pays for a loop over items before it begins, if their number is known.
    budget = _budget(context)
    if hasattr(items, "__len__"):
        budget.spend(len(items) * cost)
        return items
    return _paid(budget, items, cost) if isinstance(items, Iterator) else items


@jinja2.pass_context
def _concat(context: runtime.Context, items: list[Any]) -> str:
    _budget(context).spend_deep(items)
    return "".join(map(str, items))


def _paid(budget: _Budget, items: Iterator[Any], cost: int = 1) -> Iterator[Any]:
    for item in items:
        budget.spend(cost + _size(item))
        yield item


def _listed(budget: _Budget, values: Sequence[Any]) -> list[Any]:
    # Values, with iterators among them as lists, because they can be read only once.
    return [
        list(_paid(budget, each)) if isinstance(each, Iterator) else each
        for each in values
    ]


# The hooks of the sandbox.


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(sandbox.SandboxedEnvironment.default_binop_table)

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        tree: nodes.Template = _Pays().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(
        self, context: runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        budget = _budget(context)
        budget.spend(_size(left) + _size(right))
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(value, "__len__"):
                    budget.spend(len(value) * max(times, 0) // _CHARACTERS)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            grown = sum(bits) if operator == "*" else bits[0] * max(right, 1)
            if grown > _MAX_BITS:
                raise OverflowError(f"a number of more than {_MAX_BITS} bits")
        if operator == "%" and isinstance(left, str):
            _check_percent(budget, left, right)
        return super().call_binop(context, operator, left, right)

    def call(
        self, context: runtime.Context, called: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        budget = _budget(context)
        if isinstance(getattr(called, "__self__", None), str):
            args = tuple(_listed(budget, args))
        budget.spend(1 + sum(map(_size, (*args, *kwargs.values()))))
        self._check_call(budget, called, args, kwargs)
        result = super().call(context, called, *args, **kwargs)
        budget.spend(_size(result))
        if isinstance(result, list):
            # Splitting makes objects.
            budget.spend(len(result))
        return result

    def _check_call(
        self, budget: _Budget, called: Any, args: Sequence[Any], kwargs: Mapping
    ) -> None:
        for each in args:
            budget.spend_key(each)
        if called is _make_dict:
            budget.spend_deep(args)
        functions = self.globals.values()
        if type(called) in _CALLABLE or any(called is each for each in functions):
            return
        method = getattr(called, "__wrapped__", called)
        owner: Any = getattr(method, "__self__", None)
        if isinstance(owner, runtime.LoopContext | _Generation):
            return
        kind = str if isinstance(owner, str) else type(owner)
        name = getattr(method, "__name__", "")
        if name not in _METHODS.get(kind, ()):
            raise sandbox.SecurityError(
                f"it calls {name or type(called).__name__!r}, which chat templates"
                " cannot use here"
            )
        budget.spend(_size(owner))
        if kind is not str:
            budget.spend_deep([owner, *args] if name in ("count", "index") else [])
        elif name == "replace":
            _pay_replaced(budget, owner, *args[:2])
        elif name == "join" and args:
            _pay_joined(budget, args[0], owner)
        elif name == "format":
            _check_format(budget, owner, [*args, *kwargs.values()])


# Types that check by themselves, or raise.
_CALLABLE = (
    runtime.Macro,
    runtime.BlockReference,
    runtime.LoopContext,
    runtime.Undefined,
)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what it renders as the assistant's."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("mark"), [], [], body)
        block.set_lineno(line)
        return block

    def mark(self, caller: runtime.Macro) -> str:
        """What the block renders, between the marks."""
        return f"{BEGIN_GENERATED}{caller()}{END_GENERATED}"


class _Namespace(utils.Namespace):
    """Has no attributes of Python's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise sandbox.SecurityError(f"it sets {name!r} of a namespace")


@functools.lru_cache(maxsize=1)
def _environment() -> _Environment:
    # As that of Hugging Face's `apply_chat_template`. Constants are not folded: that
    # would run filters while a template is compiled.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=_passing(_Budget.spend_deep),
    )
    environment.filters = {
        name: _paying(
            name, environment.filters[name], deep=name not in _SHALLOW_FILTERS
        )
        for name in _FILTERS
    } | {
        "tojson": _to_json,
        "replace": _replace,
        _SPEND: _passing(_Budget.spend),
        _EACH: _each,
        _SEEN: _passing(_Budget.spend_deep),
        _CONCAT: _concat,
        _CUT: _passing(lambda budget, value: budget.spend(_size(value))),
        _KEY: _passing(_Budget.spend_key),
    }
    environment.tests = {
        name: _paying(name, cast(Any, test), deep=name not in _SHALLOW_TESTS)
        for name, test in environment.tests.items()
    }
    environment.globals = cast(
        Any,
        {
            "dict": _make_dict,
            "namespace": _Namespace,
            "range": sandbox.safe_range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        },
    )
    return environment


def _paying(
    name: str, function: Callable[..., Any], *, deep: bool
) -> Callable[..., Any]:
    """A filter or a test of Jinja's that pays for its values, and for its result."""
    passed = getattr(function, "jinja_pass_arg", None)
    passed = passed and passed.name

    @jinja2.pass_context
    def paid(context: runtime.Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend(1)
        if not deep:
            budget.spend(sum(map(_size, (*args, *kwargs.values()))))
            for each in (*args[1:], *kwargs.values()):
                budget.spend_key(each)
        else:
            args = tuple(_listed(budget, args))
            budget.spend_deep([*args, *kwargs.values()])
        check = _CHECKS.get(name)
        if check is not None:
            check(budget, *args, **kwargs)
        if passed == "context":
            args = (context, *args)
        elif passed == "eval_context":
            args = (context.eval_ctx, *args)
        elif passed == "environment":
            args = (context.environment, *args)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return _paid(budget, result)
        if isinstance(result, list):
            budget.spend(len(result))
        budget.spend(_size(result))
        return result

    return paid


def _pay_replaced(budget: _Budget, text: Any, old: Any = "", new: Any = "") -> None:
    text, old, new = str(text), str(old), str(new)
    budget.spend((text.count(old) * len(new)) // _CHARACTERS)


def _pay_joined(budget: _Budget, items: Any, between: str = "", *_: Any) -> None:
    budget.spend_deep(items)
    if hasattr(items, "__len__"):
        budget.spend(len(items) * len(str(between)) // _CHARACTERS)


def _pay_indented(
    budget: _Budget, text: Any, width: Any = 4, *_: Any, **__: Any
) -> None:
    indent = width if isinstance(width, int) else len(str(width))
    budget.spend((str(text).count("\n") + 1) * max(indent, 0) // _CHARACTERS)


def _check_digits(budget: _Budget, value: Any, *_: Any, **__: Any) -> None:
    del budget
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise OverflowError(f"a number of more than {_MAX_DIGITS} digits")


def _check_percent(budget: _Budget, text: str, values: Any = (), *more: Any) -> None:
    # Widths are at most two digits, so that a field is of the size of its value.
    if re.search(r"\*|\d{3}", text):
        raise OverflowError(f"the format {text[:40]!r} has a width of three digits")
    _pay_fields(budget, text.count("%"), [values, *more])


def _check_format(budget: _Budget, text: str, values: Sequence[Any]) -> None:
    fields = list(string.Formatter().parse(text))
    for _, _, width, _ in fields:
        if re.search(r"[{]|\d{3}", width or ""):
            raise OverflowError(f"the format {text[:40]!r} has a width of three digits")
    _pay_fields(budget, len(fields), values)


def _pay_fields(budget: _Budget, num_fields: int, values: Sequence[Any]) -> None:
    before = budget.left
    budget.spend_deep(list(values))
    budget.spend(num_fields * (before - budget.left + 100 // _CHARACTERS))


_CHECKS: dict[str, Callable[..., None]] = {
    "format": lambda budget, text, *values, **named: _check_percent(
        budget, str(text), [*values, *named.values()]
    ),
    "indent": _pay_indented,
    "int": _check_digits,
    "join": lambda budget, items, d="", *_, **__: _pay_joined(budget, items, d),
}


@jinja2.pass_context
def _replace(
    context: runtime.Context, text: Any, old: Any, new: Any, count: int | None = None
) -> str:
    budget = _budget(context)
    budget.spend(_size(text) + _size(old) + _size(new))
    _pay_replaced(budget, text, old, new)
    return str(text).replace(str(old), str(new), -1 if count is None else count)


@jinja2.pass_context
def _to_json(
    context: runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As Hugging Face's, which does not escape HTML as Jinja's does.
    budget = _budget(context)
    size = indent if isinstance(indent, int) else len(indent or "")
    if max(size, len("".join(separators or ()))) > _MAX_INDENT:
        raise OverflowError(f"tojson with an indent of more than {_MAX_INDENT}")
    before = budget.left
    depth = budget.spend_deep(value)
    # A character may become an escape of twelve, an item a line with an indent.
    times = 12 + (depth if size else 0)
    budget.spend(times * (before - budget.left))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message)[:1000])


@jinja2.pass_context
def _strftime_now(context: runtime.Context, format: str) -> str:
    date = _budget(context).date
    if not date:
        raise RefusedError(
            "it asks for the date of today (strftime_now), with which rows would change"
            " from day to day; set chat_template_date to a fixed one"
        )
    if re.search(r"%[^a-zA-Z%]*\d", format):
        raise OverflowError(f"the format {format[:40]!r} has a width")
    return datetime.datetime.fromisoformat(date).strftime(format)
