"""Layouts, checkpoints of other programs, and conversions."""

from elastic_ckpt.universal import listing
from elastic_ckpt.universal.rules.layout import LayoutError
from tests.refusals import Refusal


def _tree(text):
    def call(directory):
        (directory / "tree.json").write_text(text)
        listing.tree(str(directory / "tree.json"))

    problem = "is not a JSON object that maps names to shapes"
    return Refusal(call, problem, LayoutError, writes=True)


REFUSALS = {
    "a tree of shapes that are texts": _tree('{"a": "12"}'),
    "a tree that is missing": Refusal(
        lambda directory: listing.tree(f"{directory}/none.json"),
        "none.json cannot be read",
        LayoutError,
    ),
}
