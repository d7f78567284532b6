"""Amounts of memory as Kubernetes writes them: 64Gi, 512Mi, 10G."""

from __future__ import annotations

import re

from elastic_ckpt.deploy import names

_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_QUANTITY = re.compile(r"([1-9]\d*)(Ki|Mi|Gi|Ti|k|M|G|T)?")


def check(key: str, value: str) -> None:
    """Raises a ConfigError unless `value` is an amount of memory."""
    names.refuse(
        not _QUANTITY.fullmatch(value),
        f"{key}={value!r} is not an amount of memory; write 64Gi or 512Mi",
    )


def to_bytes(text: str) -> int:
    """The number of bytes that `text`, a valid amount, stands for."""
    match = _QUANTITY.fullmatch(text)
    assert match, text
    return int(match[1]) * _UNITS[match[2] or ""]


def of_bytes(number: int) -> str:
    """`number` bytes in the largest binary unit that divides them."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if number % _UNITS[unit] == 0:
            return f"{number // _UNITS[unit]}{unit}"
    return str(number)


def of_cpus(number: float) -> str:
    """`number` CPUs, to a thousandth."""
    return str(int(number)) if number == int(number) else f"{round(number * 1000)}m"
