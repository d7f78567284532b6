"""An agent whose protocol is another version: its first argument."""

import sys

from elastic_ckpt.tiers.peers import agent_command, protocol

if __name__ == "__main__":
    protocol.VERSION = int(sys.argv.pop(1))
    sys.exit(agent_command.main())
