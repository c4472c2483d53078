"""Asks a service for its health over gRPC: `health.py HOST:PORT`; exits with 0 if it serves, else 1 and a reason.

A service that wants a certificate is asked for a handshake only: it answers that from its own loop.
"""

import socket
import ssl
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def complaint(target: str) -> str | None:
    """What is wrong with the service at `target` (host:port); None if it serves."""
    # A proxy set for HTTP would be asked to reach this very container.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            return None if speaks_tls(target) else f"{target}: {error}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def speaks_tls(target: str) -> bool:
    """Whether a TLS handshake succeeds; whoever answers is not looked at, for it is this very container."""
    host, _, port = target.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw,
            context.wrap_socket(raw),
        ):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(complaint(sys.argv[1]))
