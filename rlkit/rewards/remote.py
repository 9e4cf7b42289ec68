"""Grader `remote_rm`: asks a reward server over HTTP, again where it is busy or gone. Called by `pool.py`.

The request is `POST {"prompt", "response", "label", "metadata"}`, the answer a JSON number or an object. Bound to the
event loop of its first call.
"""

import asyncio
import random
from typing import Any

import aiohttp
import orjson

MAX_CONNECTIONS = 64
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
_BODY_EXCERPT = 300
_WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(Exception):
    """The server gave no reward; `is_timeout` where its last answer did not come in time, `is_refusal` where it will
    not answer this request however often it is asked."""

    def __init__(self, message: str, *, is_timeout: bool = False, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        self.is_refusal = is_refusal


class RemoteGrader:
    """One reward server."""

    def __init__(self, url: str, *, timeout_s: float, max_retries: int) -> None:
        """`timeout_s` bounds one request; `max_retries` come after the first, with pauses that double up to 30 s."""
        self._url = url
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._session: aiohttp.ClientSession | None = None

    async def grade(self, body: dict[str, Any]) -> Any:
        """The server's answer. RemoteError after the last attempt, or at once where asking again cannot help."""
        data = orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS)
        last = RemoteError("never asked")
        for attempt in range(self._max_retries + 1):
            if attempt:
                pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # so that a crowd does not come back at once
            try:
                status, answer = await self._post(data)
            except (aiohttp.ClientError, TimeoutError) as error:
                is_timeout = isinstance(error, TimeoutError)
                problem = f"no answer after {self._timeout_s:g} s" if is_timeout else f"{type(error).__name__}: {error}"
                last = RemoteError(f"{self._url}: {problem}", is_timeout=is_timeout)
                continue
            if status == 200:
                return self._parse(answer)
            told = f"{self._url}: status {status}: {answer.decode(errors='replace')[:_BODY_EXCERPT]}"
            last = RemoteError(told, is_refusal=status not in _WORTH_A_RETRY)
            if last.is_refusal:
                raise last
        raise RemoteError(f"{last} (asked {self._max_retries + 1} times)", is_timeout=last.is_timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, data: bytes) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                # from the connection on: waiting for one of the 64 is not the server's fault
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s),
            )
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=data, headers=headers) as response:
            return response.status, await response.read()

    def _parse(self, answer: bytes) -> Any:
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            excerpt = answer.decode(errors="replace")[:_BODY_EXCERPT]
            raise RemoteError(f"{self._url}: the answer is not JSON: {excerpt}") from error
