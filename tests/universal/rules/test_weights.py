"""The layout of weights alone, made of one of a whole train state."""

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import relayout, saved

STATES = """
version: 1
states:
  {weights}: {{from: "{{}}", to: "params/{{}}"}}
  first_moment: {{from: "{{}}", to: "mu/{{}}"}}
rules:
  - from: {{"{{layer}}.w": "x"}}
    to: {{"w": "layer x"}}
  - from: {{"{{name:path}}": {{dims: "", replicated: [name]}}}}
    to: {{"count": ""}}
    kind: step
"""
TENSORS = [
    saved(f"{layer}.{name}", np.full(3, 10 * layer + power), kind=kind)
    for layer in range(2)
    for power, (name, kind) in enumerate(
        (("w", "master"), ("w", "first_moment"), ("w", "parameter"))
    )
] + [saved(f"{layer}/step", np.int32(7), kind="step") for layer in range(2)]


@pytest.mark.parametrize(("kind", "power"), [("master", 0), ("parameter", 2)])
def test_moments_and_steps_are_dropped(kind, power):
    other = {"master", "parameter"} - {kind}
    tensors = [each for each in TENSORS if each.kind not in other]
    layout = Layout.parse(STATES.format(weights=kind)).weights()
    arrays = relayout(layout, tensors)
    assert list(arrays) == ["params/w"]
    np.testing.assert_array_equal(
        arrays["params/w"], [[power] * 3, [10 + power] * 3], strict=False
    )


def test_a_layout_without_weights_is_refused():
    with pytest.raises(LayoutError, match="`parameter` or `master`"):
        Layout.parse(STATES.format(weights="momentum")).weights()
