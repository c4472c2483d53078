"""Types that gRPC leaves to be named: of a call's context, and of what reads a request."""

from collections.abc import Callable
from typing import TypeAlias

from grpc import aio

Context: TypeAlias = "aio.ServicerContext[object, object]"
Parse = Callable[[bytes], object]
