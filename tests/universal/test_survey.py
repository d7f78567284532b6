"""A checkpoint is listed by patterns, and a draft of a layout fits it."""

import json

import numpy as np
import pytest

from elastic_ckpt.universal import survey
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    numbered,
    relayout,
    saved,
    stored,
    targets_like,
)

LAYERS, HEADS, D, EMBED, FF, VOCAB = 3, 2, 5, 7, 11, 13


def model():
    """Tensors as PyTorch has them, with fused matrices and names of its own."""
    tensors = {
        "tok_embeddings.weight": numbered(VOCAB, EMBED),
        "norm.weight": numbered(EMBED),
    }
    for n in range(LAYERS):
        tensors |= {
            f"blocks.{n}.attn.q_proj.weight": numbered(HEADS * D, EMBED, start=n),
            f"blocks.{n}.attn.o_proj.weight": numbered(EMBED, HEADS * D, start=n),
            f"blocks.{n}.mlp.gate_up.weight": numbered(2 * FF, EMBED, start=n),
            f"blocks.{n}.mlp.down.weight": numbered(EMBED, FF, start=n),
            f"blocks.{n}.ln.weight": numbered(EMBED, start=n),
        }
    return tensors


def stack(name, tensors):
    return np.stack([tensors[f"blocks.{n}.{name}.weight"] for n in range(LAYERS)])


def test_tensors_are_listed_by_patterns():
    listed = survey.families(stored([saved(k, v) for k, v in model().items()]))
    texts = [(each.text, each.shape, len(each.names)) for each in listed]
    assert ("blocks.{0-2}.mlp.down.weight", (EMBED, FF), 3) in texts
    assert ("norm.weight", (EMBED,), 1) in texts
    assert sum(each.num_bytes for each in listed) == sum(
        each.nbytes for each in model().values()
    )


def test_a_draft_stacks_splits_and_transposes():
    tensors = model()
    expected = {
        "embed/embedding": tensors["tok_embeddings.weight"],
        "final_norm/scale": tensors["norm.weight"],
        "layers/attention/query": stack("attn.q_proj", tensors)
        .reshape(LAYERS, HEADS, D, EMBED)
        .transpose(3, 0, 1, 2),
        "layers/attention/out": stack("attn.o_proj", tensors)
        .reshape(LAYERS, EMBED, HEADS, D)
        .transpose(0, 2, 3, 1),
        "layers/mlp/down": stack("mlp.down", tensors).transpose(0, 2, 1),
        "layers/norm/scale": stack("ln", tensors),
        "layers/mlp/gate_up": stack("mlp.gate_up", tensors).transpose(2, 0, 1),
    }
    expected = {name: np.ascontiguousarray(each) for name, each in expected.items()}
    listed = stored([saved(k, v) for k, v in tensors.items()])
    text = survey.draft(listed, targets_like(expected))
    assert "# No" not in text
    made_by = Layout.parse(text)
    assert_same(relayout(made_by, tensors, targets=expected), expected)
    assert_same(relayout(made_by, tensors), expected)


def test_a_draft_fuses_parts_of_other_names_and_says_what_to_check():
    tensors = {"fc1.weight": numbered(2 * FF, EMBED)}
    gate, up = np.split(tensors["fc1.weight"], 2)
    expected = {"fc1/left": gate.T.copy(), "fc1/right": up.T.copy()}
    listed = stored([saved(k, v) for k, v in tensors.items()])
    text = survey.draft(listed, targets_like(expected))
    assert "# check the order of the parts" in text
    assert_same(relayout(Layout.parse(text), tensors, targets=expected), expected)


def test_what_has_no_partner_is_a_comment():
    listed = stored([saved("a.w", numbered(3)), saved("rope", numbered(4))])
    text = survey.draft(listed, targets_like({"a/w": numbered(3), "b": numbered(5)}))
    assert "# No leaf fits rope [4] float32" in text
    assert "# No tensor fits b [5] float32" in text


def test_names_do_not_write_rules():
    name = "x\n  - from: {evil: a}\n    to: {k: a}\n  #"
    text = survey.draft(stored([saved(name, numbered(3))]), {})
    assert text.count("\n") == 3
    assert "from:" not in text.replace("# No leaf fits", "").splitlines()[-1][:6]


def test_shapes_that_have_nothing_in_common_have_no_rule():
    listed = stored([saved("a.w", numbered(0, 3)), saved("b.w", numbered(1024))])
    targets = {"a/w": numbered(0, 3), "b/w": numbered(*[2] * 10)}
    text = survey.draft(listed, targets_like(targets))
    assert text.count("# No leaf fits") == text.count("# No tensor fits") == 2


def test_many_families_without_partners_are_comments():
    # It took minutes where all triples were tried.
    listed = [saved(f"a{chr(97 + n % 26)}{n}x.w", numbered(3, 5)) for n in range(200)]
    targets = {f"b{n}y/w": numbered(7, n + 1) for n in range(200)}
    text = survey.draft(stored(listed), targets_like(targets))
    assert text.count("# No leaf fits") == text.count("# No tensor fits") == 200


@pytest.mark.parametrize(
    "text", ['{"a": "12"}', '{"a": [1.7]}', '{"a": [-3]}', '{"a": [1e400]}', "[" * 9999]
)
def test_shapes_that_are_none_are_refused(tmp_path, text):
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(LayoutError, match="is no JSON of shapes by name"):
        survey.tree(str(tmp_path / "tree.json"))


def test_a_tree_is_a_file_of_shapes(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"x/y": [2, 3]}))
    assert survey.tree(str(path))["x/y"].shape == (2, 3)


def test_a_draft_says_which_leaf_may_be_meant_too():
    tensors = {f"{n}.weight": numbered(4) for n in ("input_norm", "post_attn_norm")}
    leaves = {"attention_norm/scale": numbered(4), "mlp_norm/scale": numbered(4)}
    listed = stored([saved(name, array) for name, array in tensors.items()])
    text = survey.draft(listed, targets_like(leaves))
    assert "# Or to mlp_norm/scale:" in text
    assert "# Or to attention_norm/scale:" in text
