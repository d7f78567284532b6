"""Failures of storage are recognised by what systems and clients write."""

import errno
import os

import pytest

from elastic_ckpt.core import storage_cause


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "full"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "full"),
        ("step 3 needs 9 bytes in /ram, and 3 are free; raise the limit", "full"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "read_only"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "refused"),
        ("PERMISSION_DENIED: Error writing local file", "refused"),
        ("UNAUTHENTICATED: HTTP response code: 401", "refused"),
        ("gcsfs: Forbidden, 403", "refused"),
        ("An error occurred (403) when calling PutObject", "refused"),
        ("An error occurred (AccessDenied) when calling PutObject", "refused"),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), "slow"),
        ("the backup of an earlier step is not done; it comes next", "slow"),
        ("UNAVAILABLE: HTTP response code: 503", "unreachable"),
        ("HTTP status 429", "unreachable"),
        (OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)), "unreachable"),
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), "unreachable"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "unreachable"),
        (OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), "missing"),
        ("is not what was saved: its digest differs", "damaged"),
        ("host 1: components were not written: Connection refused", "component"),
        ("host 1: components were not written: No space left on device", "full"),
        ("step 401 has 503 boxes at 403 hosts", "other"),
    ],
)
def test_a_failure_has_a_cause(message, cause):
    assert storage_cause.of_message(str(message)).name == cause


def test_every_cause_that_is_known_has_advice():
    causes = [each for each in vars(storage_cause).values() if isinstance(each, tuple)]
    named = [each for each in causes if isinstance(each, storage_cause.Cause)]
    assert [each.name for each in named if not each.advice] == ["other"]
