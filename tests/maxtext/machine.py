"""The supervisor of one of the machines of a run of MaxText, whose steps are slow.

python -m tests.maxtext.machine DIRECTORY ARGS...
"""

import sys

from tests.maxtext import elastic_hosts

if __name__ == "__main__":
    directory, *arguments = sys.argv[1:]
    sys.exit(elastic_hosts.run(directory, arguments, elastic_hosts.go_slowly))
