"""Layouts, checkpoints of other programs, and conversions."""

import json

from elastic_ckpt.universal import survey
from elastic_ckpt.universal.rules.layout import LayoutError
from tests.refusals import Refusal


def _tree(text):
    def call(directory):
        (directory / "tree.json").write_text(text)
        survey.tree(str(directory / "tree.json"))

    return Refusal(call, "is no JSON of shapes by name", LayoutError, writes=True)


REFUSALS = {
    "a tree of shapes that are texts": _tree('{"a": "12"}'),
    "a tree of negative shapes": _tree(json.dumps({"a": [-3]})),
    "a tree that is missing": Refusal(
        lambda directory: survey.tree(f"{directory}/none.json"),
        "none.json cannot be read",
        LayoutError,
    ),
}
