"""The clock of this process, which simulations replace by a virtual one.

Decisions that depend on time read it here, as `clock.monotonic()`: names of saves,
periods, leases, retries. Durations that are only reported do not.
"""

from __future__ import annotations

import time

time_ns = time.time_ns
monotonic = time.monotonic
sleep = time.sleep
