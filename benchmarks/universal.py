"""Suite `universal`: loads of checkpoints of other layouts, beside plain ones.

* `relayout_load_ratio_raw`: a load of raw files through a layout that changes names
  alone, over reading and transferring the same bytes.
* `relayout_load_ratio_raw_transposed`, `_stacked`: with every matrix transposed, and
  also stacked, over reading and `device_put(a.T)`.
* `relayout_load_ratio_plain_orbax`: a load of a checkpoint of Orbax, with all matrices
  transposed and all layers stacked, over Orbax's load of the same state, saved as it
  is loaded; `_raw` of safetensors instead; `_orbax_unchanged` over
  Orbax's load of the same files without changes.
* `safetensors_load_ratio_orbax_outer`, `_inner`: a load of safetensors without changes,
  sharded on one of two dims, over Orbax's load of the same files.
* `relayout_load_gib_per_sec`: of `relayout_load_ratio_raw`.
* `peak_over_bound_percent_1_gib`, `_8_gib`: the most anonymous memory of a process
  beyond the arrays, over the budget of bytes in flight; `_orbax` of Orbax's files.
* `read_over_needed_percent`, `_inner`, `requests_per_host`: of the plans of 8 hosts.
* `convert_ratio_cp`: the time of a durable copy of the same bytes over that of a
  conversion to an Orbax step, verified; `_safetensors` to safetensors, `_transposed`
  with every matrix transposed.
* `match_and_plan_secs`: from a checkpoint of 1e6 tensors and rules to a host's plan;
  `plan_experts_secs` of a model of 60 layers of 256 experts, saved by 8 ranks;
  `open_match_and_plan_dcp_secs` from files of PyTorch's distributed checkpoints, with
  the time of the processor and the peak of memory.
"""

from __future__ import annotations

from benchmarks import (
    report,
    universal_convert,
    universal_orbax,
    universal_peaks,
    universal_plan,
    universal_raw,
)


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    parts = (
        universal_raw,
        universal_orbax,
        universal_peaks,
        universal_convert,
        universal_plan,
    )
    return {name: figure for part in parts for name, figure in part.measure().items()}
