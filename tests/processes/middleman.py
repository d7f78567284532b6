"""A peer that stands in for a machine's agent, and forwards its responses.

It answers late, or alters the values, as its test defines.
"""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import urllib.parse

from elastic_ckpt.tiers.peers import agent
from tests.tiers import scripted_peer

_PASSED_ON = ("Authorization", "Range")


def the_truth(path, body):
    """The response of the agent, unchanged."""
    del path
    return body


@contextlib.contextmanager
def instead_of(root, *, lie=the_truth):
    """Announces itself as the agent of the RAM disk `root`, while the block lasts.

    Args:
      root: of the RAM disk.
      lie: changes the values.
    """
    true = agent.find(root)
    behind = urllib.parse.urlsplit(true.url)

    def respond(connection, request):
        line, *lines = request.decode().split("\r\n")
        method, path, _ = line.split()
        received = dict(each.split(": ", 1) for each in lines if each)
        headers = {name: received[name] for name in _PASSED_ON if name in received}
        asked = http.client.HTTPConnection(behind.hostname, behind.port)
        with contextlib.closing(asked):
            asked.request(method, path, headers=headers)
            answer = asked.getresponse()
            body = answer.read()
        bounds = answer.getheader("Content-Range")
        connection.sendall(
            scripted_peer.answer(
                lie(path, body),
                status=f"{answer.status} {answer.reason}",
                headers=[f"Content-Range: {bounds}"] if bounds else [],
            )
        )

    place = pathlib.Path(root, agent.ADDRESS_FILE)
    with scripted_peer.ScriptedPeer(respond) as peer:
        announced = dataclasses.replace(true, url=peer.url + behind.path)
        place.write_text(json.dumps(dataclasses.asdict(announced)))
        try:
            yield peer
        finally:
            place.write_text(json.dumps(dataclasses.asdict(true)))


def flip_values(path, body):
    """Flips a bit of whatever is no list of steps and no manifest."""
    if body and ("/c/" in path or "/data/" in path):
        return bytes([body[0] ^ 1]) + body[1:]
    return body
