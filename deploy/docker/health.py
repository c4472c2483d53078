"""Asks a service for its health over gRPC: `health.py HOST:PORT`; exits with 0 if it serves, else 1 and a reason."""

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
            return f"{target}: {error}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


if __name__ == "__main__":
    sys.exit(complaint(sys.argv[1]))
