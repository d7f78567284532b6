import http.server
import json
import threading

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import kubernetes_node

TOKEN = "the-token-of-the-account"
LABELS = {
    "topology.kubernetes.io/region": "us-east5",
    "topology.kubernetes.io/zone": "us-east5-a",
    "cloud.google.com/gce-topology-block": "b1",
    "cloud.google.com/gce-topology-subblock": "s4",
    "example.com/row": "row-2",
    "other": "x",
}


class Api(http.server.BaseHTTPRequestHandler):
    """The Kubernetes API, with one node."""

    def do_GET(self):
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        is_node = self.path == "/api/v1/nodes/node-7"
        status = 200 if allowed and is_node else 404 if allowed else 403
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"metadata": {"labels": LABELS}}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.HTTPServer(("127.0.0.1", 0), Api) as api:
        thread = threading.Thread(target=api.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{api.server_port}"
        api.shutdown()
        thread.join()


@pytest.fixture
def account(tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    return str(tmp_path)


def test_the_labels_of_a_node_are_those_of_its_object(server, account):
    labels = kubernetes_node.read_labels(
        "node-7", server=server, account_directory=account
    )
    assert labels == LABELS
    assert kubernetes_node.domains(labels, kubernetes_node.LABELS) == {
        "region": "us-east5",
        "zone": "us-east5-a",
        "block": "b1",
        "rack": "s4",
    }
    label_of = {"rack": "example.com/row", "block": "example.com/none"}
    assert kubernetes_node.domains(LABELS, label_of) == {"rack": "row-2"}


def test_a_node_that_cannot_be_read_is_an_error_with_the_remedy(
    server, account, tmp_path
):
    for node in ("node-8", "../secrets", "node-7/status"):
        with pytest.raises(errors.RunError, match="verb get on nodes"):
            kubernetes_node.read_labels(node, server=server, account_directory=account)
    (tmp_path / "token").write_text("another-token")
    with pytest.raises(errors.RunError, match="403") as error:
        kubernetes_node.read_labels("node-7", server=server, account_directory=account)
    assert "another-token" not in str(error.value)
