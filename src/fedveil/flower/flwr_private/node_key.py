"""Is a site's key registered with SuperLink? Asked as the site itself."""

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.flower.flwr_private.supernode import cause_of

_SHORT = 10.0  # seconds for which the site counts as online


def is_registered(address: str, authority: Path, key: Path, port: int | None) -> str:
    """Return how it is known that a key is registered. Raises BadInput with the cause if it is not.

    If something listens at `port` on loopback, the site's SuperNode runs, and SuperLink is not
    asked: it would take the question for the SuperNode's own.

    Args:
        address: HOST:PORT of SuperLink.
        authority: The file with the authority's certificate.
        key: The private key of the site.
        port: The port of the site's SuperNode on loopback. None: it has none.
    """
    if port is not None:
        with closing(socket.socket()) as listening:
            if listening.connect_ex(("127.0.0.1", port)) == 0:
                return "the SuperNode runs: see its log"
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    public = private.public_key()
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
    ]
    ask = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=_SHORT)
    with FleetHttpClient.from_server_address(
        address, False, str(authority), interceptors=interceptors
    ) as client:
        try:
            node = client.ActivateNode(ask).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except httpx.HTTPStatusError as e:
            response = e.response
            path, date = response.url.path, response.headers.get("date")
            cause = cause_of(response.status_code, date, path)
            raise BadInput(cause or f"SuperLink answers with {response.status_code}") from e
    return "SuperLink knows this site's key"
