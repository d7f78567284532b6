"""A layout: the rules that relate the tensors of a checkpoint with those of a target.

A layout is a YAML file (see GRAMMAR.md), or the same as Python values:

    Layout.from_dict({"rules": [{"from": {...}, "to": {...}}]})
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from elastic_ckpt.universal.rules import layout_file, name_pattern, relation
from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.choice import Choice
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Index, Rule, Size
from elastic_ckpt.universal.rules.state import ONLY_PARAMETERS, State

# What the tree of a step of Orbax is called, unless a layout says otherwise.
TREE = "state"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rules, and what they have in common.

    Attributes:
      rules: at least one.
      sizes: of dims, by name.
      widths: the sizes on each rank, by dim and rank axis.
      index: tables, by dim.
      ranks: the number of ranks by axis, where the format does not store it.
      states: the kinds of tensors that follow a parameter.
      drop: names of tensors of the checkpoint that are not used; `*` is any text.
      drop_inverse: the same for the inverse.
      drop_of_kind: kinds and names, as in `drop`; not in files.
      fill: numbers, or values of the checkpoint, by the names of leaves of the target
        that no rule fills.
      fill_inverse: the same for the inverse: tensors of the checkpoint that are not
        used; not in files.
      lists: the paths of trees in a written target that are lists, `opt_state`; their
        keys are numbers.
      tree: the name that the tree of targets has in a written step of Orbax.
      tree_inverse: the same for the inverse.
      place: for messages.
    """

    rules: tuple[Rule, ...]
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    widths: Mapping[str, Mapping[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    index: Mapping[str, Index] = dataclasses.field(default_factory=dict)
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
    lists: tuple[str, ...] = ()
    tree: str = TREE
    tree_inverse: str = TREE
    place: str = dataclasses.field(default="the layout", compare=False)

    def __post_init__(self) -> None:
        if not self.rules:
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
            relation.Relation(self.complete(rule), None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layout:
        """The layout in a YAML file.

        Raises:
          LayoutError: names file, line and the path in the file.
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
        """The layout in `text`; messages name `file`.

        Raises:
          LayoutError: as in `load`.
        """
        return cls(**layout_file.read(text, file=file), place=file)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, name: str = "layout") -> Layout:
        """The layout of the values that its file would have; messages name `name`.

            rule = {"from": {"wte": "vocab embed"}, "to": {"emb": "vocab embed"}}
            Layout.from_dict({"rules": [rule]})

        Args:
          fields: by key, as GRAMMAR.md lists them; `version` may be left out.
          name: for messages.

        Raises:
          LayoutError: names the path in the layout.
        """
        return cls(**layout_file.read_values(fields, name=name), place=name)

    def inverse(self) -> Layout:
        """The layout of the other direction."""
        return dataclasses.replace(
            self,
            rules=tuple(rule.inverse() for rule in self.rules),
            states={kind: state.inverse() for kind, state in self.states.items()},
            drop=self.drop_inverse,
            drop_inverse=self.drop,
            drop_of_kind=(),
            fill=self.fill_inverse,
            fill_inverse=self.fill,
            tree=self.tree_inverse,
            tree_inverse=self.tree,
        )

    def with_sizes(self, sizes: Mapping[str, Size]) -> Layout:
        """The layout with other sizes, in place of those of the same names.

        Rules that have a size of the name themselves keep it.

        Raises:
          LayoutError: if a size is none of those to choose from.
        """
        if not sizes:
            return self
        for name, size in sizes.items():
            asked = self.sizes.get(name)
            if isinstance(asked, Choice):
                asked.check(name, size)
        return dataclasses.replace(self, sizes={**self.sizes, **sizes})

    def check_choices(self) -> None:
        """Checks that every size that a user has to choose was chosen.

        Raises:
          LayoutError: names the size and what its numbers mean.
        """
        for sizes in (self.sizes, *(rule.sizes for rule in self.rules)):
            for name, size in sizes.items():
                if isinstance(size, Choice):
                    raise size.missing(name)

    def with_values(self, values: Mapping[str, Any]) -> Layout:
        """The layout with numbers for the values of a checkpoint.

        Args:
          values: by path, see `stored.Checkpoint`. Those that it lacks are left as they
            are: shapes may determine the sizes.

        Raises:
          LayoutError: if one is no number.
        """
        made = [_with_values(each, values) for each in (self.sizes, self.fill)]
        rules = [
            dataclasses.replace(rule, sizes=_with_values(rule.sizes, values))
            for rule in self.rules
        ]
        if (*made, *rules) == (self.sizes, self.fill, *self.rules):
            return self
        sizes, fill = made
        return dataclasses.replace(self, sizes=sizes, fill=fill, rules=tuple(rules))

    def only(self, kinds: Collection[str]) -> Layout:
        """The layout that drops tensors of states other than `kinds`."""
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
        """The layout that drops all but parameters, or master weights in their place.

        Raises:
          LayoutError: if the target has neither.
        """
        for kind in ("parameter", "master"):
            state = self.states.get(kind)
            if state is not None and None not in (state.source, state.target):
                return self.only([kind])
        raise LayoutError(
            f"{self.place}: no state is `parameter` or `master`, with `from` and `to`;"
            " add one to `states`"
        )

    def complete(self, rule: Rule) -> Rule:
        """`rule` with the sizes, widths and tables of the layout."""
        return dataclasses.replace(
            rule,
            sizes={**self.sizes, **rule.sizes},
            widths={**self.widths, **rule.widths},
            index={**self.index, **rule.index},
        )


def _with_values(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(given)
    for name, each in given.items():
        if isinstance(each, CheckpointValue):
            number = each.number(values)
            made[name] = each if number is None else number
    return made
