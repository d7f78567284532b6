"""This process's clock, which simulations replace with a virtual one.

Code whose decisions depend on time calls `clock.monotonic()`: save names, periods,
leases, retries. Code that only reports durations need not.
"""

from __future__ import annotations

import time

time_ns = time.time_ns
monotonic = time.monotonic
sleep = time.sleep
