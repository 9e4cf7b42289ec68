"""Blocking calls to engines from a training rank, for the channels: one HTTP client an engine, all engines at once.

Runs its own event loop in the calling thread, so that a channel reads as straight code.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlkit.engines.client import EngineClient
from rlkit.types.ranks import EngineEndpoint

T = TypeVar("T")


class EngineCalls:
    """Fan-out to a fixed set of engines."""

    def __init__(self, endpoints: Sequence[EngineEndpoint], *, timeout_s: float) -> None:
        self.endpoints = list(endpoints)
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._clients: dict[int, EngineClient] = {}

    def all(self, call: Callable[[EngineClient, EngineEndpoint], Awaitable[T]]) -> list[T]:
        """`call` on every engine concurrently; answers in engine order, the first error is raised after all have
        ended."""

        async def fan_out() -> list[T]:
            results = await asyncio.gather(
                *(call(self._client(endpoint), endpoint) for endpoint in self.endpoints), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return [result for result in results if not isinstance(result, BaseException)]

        return self._runner.run(fan_out())

    def start(self, call: Callable[[EngineClient, EngineEndpoint], Awaitable[T]]) -> Callable[[], list[T]]:
        """Start `call` on every engine in a thread and return a function that waits for the answers.

        For collectives that engines join while this rank joins them too.
        """
        from concurrent.futures import ThreadPoolExecutor

        executor = ThreadPoolExecutor(max_workers=1)
        future = executor.submit(self.all, call)

        def wait() -> list[T]:
            try:
                return future.result()
            finally:
                executor.shutdown(wait=False)

        return wait

    def _client(self, endpoint: EngineEndpoint) -> EngineClient:
        # Made inside the loop: aiohttp binds a session to the running one.
        if endpoint.index not in self._clients:
            self._clients[endpoint.index] = EngineClient(endpoint.url, timeout_s=self._timeout_s)
        return self._clients[endpoint.index]

    def close(self) -> None:
        async def close_all() -> None:
            for client in self._clients.values():
                await client.close()

        self._runner.run(close_all())
        self._runner.close()
