"""A layout: the rules that relate the tensors of a checkpoint with those of a target.

A layout is a YAML file (see GRAMMAR.md), or the same as Python values:

    Layout.from_dict({"rules": [{"from": {...}, "to": {...}}]})
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from elastic_ckpt.universal.new_rules.rule import ParsedRule
from elastic_ckpt.universal.rules import layout_file, name_pattern
from elastic_ckpt.universal.rules.checkpoint_value import (
    CheckpointValue,
    Required,
    unmet,
)
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import (
    DIRECTIONS,
    Rule,
    Size,
)
from elastic_ckpt.universal.rules.state import ONLY_PARAMETERS, State

# What the tree of a step of Orbax is called, unless a layout says otherwise.
TREE = "state"
_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the tensors of a checkpoint relate to the leaves of a tree.

    `load` reads one from a YAML file, and `from_dict` from Python values; the site's
    page of layout rules explains the keys, of which the attributes are the parsed form.

    Attributes:
      rules: the rules, each of which relates some tensors with some leaves.
      sizes: the sizes of dims by name.
      widths: the sizes of a dim on each rank, by dim and rank axis, if ranks differ.
      ranks: the number of ranks by axis, where the format does not store it.
      states: the kinds of tensors that belong to a parameter: itself, its master
        weights, its moments.
      drop: names of tensors of the checkpoint that are not used; `*` stands for any
        text.
      drop_inverse: the same in the other direction.
      drop_of_kind: the same for tensors of one kind; it cannot be given in a file.
      fill: values for leaves that no rule fills, by their names: numbers, or references
        to values of the checkpoint.
      fill_inverse: the same in the other direction; it cannot be given in a file.
      require: the values of the checkpoint for which the layout is right, by path;
        None is a value that is missing.
      require_inverse: the same in the other direction; it cannot be given in a file.
      lists: the paths of lists, such as `opt_state`, in a tree that is written; their
        keys are numbers.
      through: layouts that are applied one after another, in place of rules.
      tree: the name of the tree in a step of Orbax that is written.
      tree_inverse: the same in the other direction.
      place: the file, or another name, for messages.
    """

    rules: tuple[Rule, ...]
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    widths: Mapping[str, Mapping[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    states: Mapping[str, State] = dataclasses.field(
        default_factory=lambda: ONLY_PARAMETERS
    )
    drop: tuple[str, ...] = ()
    drop_inverse: tuple[str, ...] = ()
    drop_of_kind: tuple[tuple[str | None, str], ...] = ()
    fill: Mapping[str, float | CheckpointValue] = dataclasses.field(
        default_factory=dict
    )
    fill_inverse: Mapping[str, float | CheckpointValue] = dataclasses.field(
        default_factory=dict
    )
    require: Required = dataclasses.field(default_factory=dict)
    require_inverse: Required = dataclasses.field(default_factory=dict)
    lists: tuple[str, ...] = ()
    through: tuple[Layout, ...] = ()
    tree: str = TREE
    tree_inverse: str = TREE
    place: str = dataclasses.field(default="the layout", compare=False)

    def __post_init__(self) -> None:
        if not self.rules and not self.through:
            raise LayoutError(f"{self.place}: there are no rules; add some to `rules`")
        for rule in self.rules:
            for state in rule.states or ():
                if state not in self.states:
                    raise LayoutError(
                        f"{rule.text}: the state {state!r} is not in `states`, which "
                        f"lists {', '.join(self.states)}"
                    )
            if rule.kind is not None and rule.states is not None:
                raise LayoutError(f"{rule.text}: choose one of `kind` and `states`")
            if rule.only != DIRECTIONS[1]:
                ParsedRule(self.complete(rule))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layout:
        """Reads a layout from a YAML file.

        Raises:
          LayoutError: if the file cannot be read, or is no layout; it names the
            place in the layout.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LayoutError(
                f"{path}: this file cannot be read: {error}; check the path and its"
                " permissions"
            ) from None
        return cls.parse(text, file=os.fspath(path))

    @classmethod
    def parse(cls, text: str, *, file: str = "layout") -> Layout:
        """Reads a layout from the text of a YAML file.

        Args:
          text: the text.
          file: a name for messages.

        Raises:
          LayoutError: as `load`.
        """
        made = cls(**layout_file.read(text, file=file), place=file)
        made._check_its_sizes()
        return made

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, name: str = "layout") -> Layout:
        """Makes a layout of the values that its file would contain.

            rule = {"from": {"wte": "vocab embed"}, "to": {"emb": "vocab embed"}}
            Layout.from_dict({"rules": [rule]})

        Args:
          fields: the keys of a layout file; `version` may be left out.
          name: a name for messages.

        Raises:
          LayoutError: if it is no layout; it names the place.
        """
        made = cls(**layout_file.read_values(fields, name=name), place=name)
        made._check_its_sizes()
        return made

    def inverse(self) -> Layout:
        """The layout of the other direction: from the tree to the checkpoint."""
        return dataclasses.replace(
            self,
            through=tuple(each.inverse() for each in reversed(self.through)),
            rules=tuple(rule.inverse() for rule in self.rules),
            states={kind: state.inverse() for kind, state in self.states.items()},
            drop=self.drop_inverse,
            drop_inverse=self.drop,
            drop_of_kind=(),
            fill=self.fill_inverse,
            fill_inverse=self.fill,
            require=self.require_inverse,
            require_inverse=self.require,
            tree=self.tree_inverse,
            tree_inverse=self.tree,
        )

    def with_sizes(self, sizes: Mapping[str, Size]) -> Layout:
        """The layout with other sizes of dims, which replace those of the same names.

        A number or arithmetic that a rule has of its own stays.

        Raises:
          LayoutError: if no rule uses one.
        """
        if not sizes:
            return self
        self._check_sizes(sizes)
        rules = [
            dataclasses.replace(
                rule,
                sizes={
                    name: sizes.get(name, size)
                    if isinstance(size, CheckpointValue)
                    else size
                    for name, size in rule.sizes.items()
                },
            )
            for rule in self.rules
        ]
        return dataclasses.replace(
            self,
            rules=tuple(rules),
            sizes={**self.sizes, **sizes},
            through=tuple(each._with_its_sizes(sizes) for each in self.through),
        )

    def _with_its_sizes(self, sizes: Mapping[str, Size]) -> Layout:
        words = self._words()
        return self.with_sizes({name: sizes[name] for name in sizes if name in words})

    def _check_its_sizes(self) -> None:
        self._check_sizes({name for each in (self, *self.rules) for name in each.sizes})

    def _check_sizes(self, sizes: Collection[str]) -> None:
        words = self._words() if sizes else set()
        for name in sizes:
            if name not in words:
                near = difflib.get_close_matches(name, words - {*sizes}, n=1)
                raise LayoutError(
                    f"{self.place}: no rule uses the size {name!r}"
                    + (f"; the nearest name is {near[0]!r}" if near else "")
                )

    def _words(self) -> set[str]:
        # All words of the expressions and names of rules: those of dims are among them.
        words = {word for each in self.through for word in each._words()}
        for each in (self, *self.rules):
            words |= each.widths.keys()
            texts = [size for size in each.sizes.values() if isinstance(size, str)]
            words.update(_WORD.findall(" ".join(texts)))
        for rule in self.rules:
            words.update(rule.pad)
            for tensor in (*rule.source, *rule.target):
                for each in (tensor, *tensor.times, *tensor.plus):
                    texts = (each.name, each.dims, str(each.scale), str(each.shift))
                    words.update(_WORD.findall(" ".join(texts)))
        return words

    def with_values(self, values: Mapping[str, Any]) -> Layout:
        """The layout with numbers in place of its references to a checkpoint's values.

        Args:
          values: the values by path, such as those of a `config.json`. References to
            others stay: shapes may determine these sizes.

        Raises:
          LayoutError: if a value is not a number, or not one that is required.
        """
        if lacking := unmet(self.require, values):
            raise LayoutError(
                f"{self.place}: {lacking}; use another layout, or change it with the"
                " program that wrote the checkpoint"
            )
        made = [_with_values(each, values) for each in (self.sizes, self.fill)]
        rules = [
            dataclasses.replace(
                rule,
                sizes=_with_values(rule.sizes, values),
                unmet=unmet(rule.require, values),
            )
            for rule in self.rules
        ]
        through = tuple(each.with_values(values) for each in self.through)
        before = (self.sizes, self.fill, *self.rules, *self.through)
        if (*made, *rules, *through) == before:
            return self
        sizes, fill = made
        return dataclasses.replace(
            self, sizes=sizes, fill=fill, rules=tuple(rules), through=through
        )

    def only(self, kinds: Collection[str]) -> Layout:
        """The layout without the tensors of other kinds than `kinds`."""
        if self.through:
            first, *others = self.through
            return dataclasses.replace(self, through=(first.only(kinds), *others))
        states = {
            kind: state if kind in kinds else State(source=state.source, target=None)
            for kind, state in self.states.items()
        }
        rules = [rule for rule in self.rules if rule.kind in (None, *kinds)]
        drop = tuple(
            (rule.kind, name_pattern.parse(tensor.name).globbed)
            for rule in self.rules
            if rule.kind not in (None, *kinds)
            for tensor in rule.source
        )
        return dataclasses.replace(
            self, states=states, rules=tuple(rules), drop_of_kind=drop
        )

    def weights(self) -> Layout:
        """The layout of the weights alone: parameters, or else master weights.

        Raises:
          LayoutError: if the tree has neither.
        """
        if self.through:
            first, *others = self.through
            return dataclasses.replace(self, through=(first.weights(), *others))
        for kind in ("parameter", "master"):
            state = self.states.get(kind)
            if state is not None and None not in (state.source, state.target):
                return self.only([kind])
        raise LayoutError(
            f"{self.place}: no state is `parameter` or `master`, with `from` and `to`;"
            " add one to `states`"
        )

    def complete(self, rule: Rule) -> Rule:
        """`rule` with the sizes and widths of the layout."""
        return dataclasses.replace(
            rule,
            sizes={**self.sizes, **rule.sizes},
            widths={**self.widths, **rule.widths},
        )


def _with_values(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(given)
    for name, each in given.items():
        if isinstance(each, CheckpointValue):
            number = each.number(values)
            made[name] = each if number is None else number
    return made
