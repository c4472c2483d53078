"""The type of a call's context."""

from typing import TypeAlias

from grpc import aio

Context: TypeAlias = "aio.ServicerContext[object, object]"
