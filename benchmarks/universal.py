"""Suite `universal`: loads of checkpoints of other layouts, beside plain ones.

* `relayout_load_ratio_plain_orbax`: a load of a checkpoint of Orbax, with all matrices
  transposed and all layers stacked, over Orbax's load of the same state, saved as it
  is loaded; `_unchanged` over Orbax's load of the same files without changes.
* `safetensors_load_ratio_orbax_outer`: a load of safetensors without changes, sharded
  on the outer dim, over Orbax's load of the same files.
* `read_over_needed_percent_torch`: what 128 hosts read of files of torch.save, with
  what they read for checksums, over what they need.
* `convert_ratio_cp`: the time of a durable copy of the same bytes over that of a
  conversion to an Orbax step, verified; `_safetensors` to safetensors.
* `plan_experts_secs`: the plan of a host for a model of 60 layers of 256 experts, saved
  by 8 ranks; `open_match_and_plan_dcp_secs`: from files of PyTorch's distributed
  checkpoints, with 1e6 tensors and rules, to the plan of a host.
"""

from __future__ import annotations

from benchmarks import report, universal_convert, universal_loads, universal_plan


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    parts = (universal_loads, universal_convert, universal_plan)
    return {name: figure for part in parts for name, figure in part.measure().items()}
