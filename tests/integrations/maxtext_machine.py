"""One of the machines of a run of MaxText, for which a stand-in is on the path."""

import sys

from elastic_ckpt.core import events
from elastic_ckpt.integrations import maxtext_elastic
from tests.integrations import test_maxtext_elastic

if __name__ == "__main__":
    given = sys.argv[1:]
    maxtext_elastic.run(
        maxtext_elastic.run_config(given),
        given,
        emit=events.nobody,
        train=test_maxtext_elastic.report_steps,
    )
