import http.server
import json
import ssl
import threading

import pytest
import trustme

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent_server

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
def account(tmp_path, monkeypatch):
    """The directory of the account of a pod that reaches the API."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text(TOKEN + "\n")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with http.server.HTTPServer(("127.0.0.1", 0), Api) as api:
        api.socket = tls.wrap_socket(api.socket, server_side=True)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
        thread = threading.Thread(target=api.serve_forever, args=(0.01,))
        thread.start()
        yield str(tmp_path)
        api.shutdown()
        thread.join()


def test_the_labels_of_a_node_are_those_of_its_object(account):
    labels = agent_server.read_labels("node-7", account_directory=account)
    assert labels == LABELS


def test_labels_name_the_domains_that_nobody_else_has_named(monkeypatch):
    monkeypatch.setattr(agent_server, "read_labels", lambda _: LABELS)
    of_labels = {
        "region": "us-east5",
        "zone": "us-east5-a",
        "block": "b1",
        "rack": "s4",
    }
    assert agent_server.node_domains({}, "node-7", {}) == of_labels
    further = {"rack": "example.com/row", "block": "example.com/none", "row": "other"}
    found = agent_server.node_domains({"zone": "z"}, "node-7", further)
    assert found == {"region": "us-east5", "zone": "z", "rack": "row-2", "row": "x"}
    assert agent_server.node_domains({"zone": "z"}, None, further) == {"zone": "z"}


def test_a_node_that_cannot_be_read_is_an_error_with_the_remedy(account, tmp_path):
    for node in ("node-8", "../secrets", "node-7/status"):
        with pytest.raises(errors.RunError, match="verb get on nodes"):
            agent_server.read_labels(node, account_directory=account)
    (tmp_path / "token").write_text("another-token")
    with pytest.raises(errors.RunError, match="403") as error:
        agent_server.read_labels("node-7", account_directory=account)
    assert "another-token" not in str(error.value)
