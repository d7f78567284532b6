"""What host processes need of the script that starts them.

A host process imports the script, as a module, and finds the training function there by
its name. So the script starts its run under `if __name__ == "__main__":`, and the
function is one that can be pickled.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from types import FrameType

from elastic_ckpt.core import errors


def check_guarded(what: str) -> None:
    """Raises a ConfigError if host processes would call this function, too.

    Args:
      what: the caller makes, for the error.
    """
    line = _line_of_main()
    is_host = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_host or (line is not None and not _is_guarded(line)):
        path = getattr(sys.modules["__main__"], "__file__", "the script")
        at = "" if line is None else f", line {line}"
        raise errors.ConfigError(
            f"{path}{at}: {what} starts processes, and each of them runs this script"
            ' again; put what is not a definition under `if __name__ == "__main__":`'
        )


def check_sent(train: Callable[..., object]) -> None:
    """Raises a ConfigError if a training function cannot be sent to host processes."""
    try:
        sent = pickle.dumps(train)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise errors.ConfigError(
            f"the training function cannot be sent to host processes ({error}); define"
            " it with `def` at the top of a module, and give it values by"
            " functools.partial"
        ) from None
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""
    is_imported = os.path.exists(path) or main.__spec__ is not None
    if b"__main__" in sent and not is_imported:
        raise errors.ConfigError(
            "the training function is defined in an interactive session, or in a"
            " program without a file, which host processes cannot import; put it into"
            " a file"
        )


def _line_of_main() -> int | None:
    # The line that the script is at, at its top; None if no process imports it again.
    main = sys.modules["__main__"]
    spec = main.__spec__
    if spec is not None and spec.name.rpartition(".")[2] == "__main__":
        return None
    line = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    return line


def _is_guarded(line: int) -> bool:
    # Whether the statement of the script at that line depends on `__name__`.
    try:
        with open(str(sys.modules["__main__"].__file__), "rb") as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, AttributeError):
        return True
    return any(
        isinstance(each, ast.If)
        and any(
            isinstance(part, ast.Name) and part.id == "__name__"
            for part in ast.walk(each.test)
        )
        for each in statements
        if each.lineno <= line <= (each.end_lineno or each.lineno)
    )
