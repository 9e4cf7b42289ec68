"""Grader `reward_model`: scores of a sequence classification model behind SGLang's `POST /classify` (a server with
`--is-embedding`, or `engines/embedded/reward_server.py`). Called by `pool.py`.

Responses that wait at the same moment travel together. Bound to the event loop of its first call.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.rewards.remote import RemoteError, RemoteGrader
from rlkit.types.errors import RewardError
from rlkit.types.samples import Prompt, Sample

ENDPOINT = "/classify"
GATHER_S = 0.005
"""How long the first response waits for company."""
MAX_BATCHES = 4
"""Requests in flight: one that is computed, and some that travel."""

RenderForReward = Callable[[Sample, Prompt], list[int]]
"""Prompt and response as ids of the reward model's own tokenizer."""


class RewardModelClient:
    """One server with a reward model."""

    def __init__(
        self, url: str, *, render: RenderForReward, batch_size: int, timeout_s: float, max_retries: int
    ) -> None:
        """`batch_size` bounds the responses of one request, `timeout_s` one request; retries as for `remote_rm`."""
        self._url = url.rstrip("/") + ENDPOINT
        self._render = render
        self._batch_size = batch_size
        self._server = RemoteGrader(self._url, timeout_s=timeout_s, max_retries=max_retries)
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._slots = asyncio.Semaphore(MAX_BATCHES)
        self._batches: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample, prompt: Prompt) -> float:
        """RemoteError where the server gives no score; RewardError where it is no server of a reward model."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_later(GATHER_S, self._send_waiting)
        self._waiting.append((self._render(sample, prompt), future))
        return await future

    async def close(self) -> None:
        for task in self._batches:
            task.cancel()
        if self._batches:
            await asyncio.wait(self._batches)
        await self._server.close()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), self._batch_size):
            task = asyncio.create_task(self._send(waiting[start : start + self._batch_size]))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _send(self, batch: list[tuple[list[int], asyncio.Future[float]]]) -> None:
        batch = [(ids, future) for ids, future in batch if not future.done()]  # whoever waited may have been cancelled
        if not batch:
            return
        try:
            async with self._slots:
                answer = await self._server.grade({"input_ids": [ids for ids, _ in batch]})
            scores = read_scores(answer, len(batch), self._url)
        except RemoteError as error:
            if len(batch) > 1 and error.is_refusal:  # one response may be too long: it must not take others along
                await asyncio.gather(*(self._send([item]) for item in batch))
                return
            _fail(batch, error)
        except RewardError as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)


def _fail(batch: Sequence[tuple[list[int], asyncio.Future[float]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)


def read_scores(answer: Any, count: int, url: str) -> list[float]:
    """SGLang's answer, a list of `{"embedding": [score], ...}`. RewardError where it is something else."""
    rows = answer if isinstance(answer, list) else [answer]
    found = [row.get("embedding") if isinstance(row, dict) else None for row in rows]
    numbers = [row for row in found if isinstance(row, list)]
    if not len(rows) == len(numbers) == count:
        raise RewardError(
            f"{url}: expected {count} objects with an embedding, got {str(answer)[:200]}; --rm-url must be a server of "
            "a sequence classification model (SGLang with --is-embedding)"
        )
    wide = next((row for row in numbers if len(row) != 1), None)
    if wide is not None:
        raise RewardError(
            f"{url}: a reward model gives one number, this one gives {len(wide)}; use a model with num_labels 1"
        )
    return [float(row[0]) for row in numbers]
