"""Grading for a run: `GraderPool` keeps the event loop free and every grading inside a time limit. Called by the
rollout manager.

Built-in graders answer in this process unless computer algebra is needed; algebra and custom functions run in
`--rm-num-workers` processes. A sample that cannot be scored gets None and a counted reason; it never gets a made-up 0.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.config.schema import RewardConfig
from rlkit.rewards.algebra import WALL_LIMIT_S, VerdictMemory, algebra_setup
from rlkit.rewards.grading import AlgebraNeeded, UnscorableError, assess, resolve_rm_type
from rlkit.rewards.process import GraderProcess, WorkerLostError
from rlkit.rewards.remote import RemoteError, RemoteGrader
from rlkit.rewards.reward_model import RenderForReward, RewardModelClient
from rlkit.rewards.sandbox import Limits, NoTestsError, extract_program, passes, read_tests
from rlkit.rewards.watch import MarkerWatch
from rlkit.rewards.wire import Reply, UnsendableError, WorkerSetup
from rlkit.types.errors import ConfigError, DataError, RewardError
from rlkit.types.samples import Prompt, Sample

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 300.0
_GRACE_S = 2.0  # a process enforces its limit itself; this is how much later its parent does
_ASYNC_REQUESTS_PER_PROCESS = 64
_LONG_TEXT_CHARS = 50_000  # assessing more than this takes milliseconds: in a thread, not on the loop
_MAX_LOGGED_ERRORS = 5

UNSCORED_REASONS = ("timeout", "crash", "error", "none", "not_finite")
"""Why samples were left without a reward: time limit, process death, exception in the function, it returned None, it
returned NaN or infinity.
"""


_COUNTERS = ("graded", *UNSCORED_REASONS, "algebra_limit", "processes_replaced")


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeResult:
    """Outcome of one grading."""

    reward: float | None
    """None when the sample could not be scored."""
    detail: dict[str, Any] | None
    """The whole dict of a function that returned one."""
    seconds: float
    """Wall-clock time, waiting for a free process included."""
    error: str | None = None
    """Why there is no reward: one of UNSCORED_REASONS, a colon, details."""


class _UnscoredError(Exception):
    """One sample cannot be scored; `reason` is one of UNSCORED_REASONS."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(details)
        self.reason = reason


class GraderPool:
    """Grades samples one by one, as many at a time as the caller likes. Belongs to one event loop.

    Starts by itself; `start` reports a broken `--custom-rm-path` before anything is generated.
    """

    def __init__(self, cfg: RewardConfig, *, render: RenderForReward | None = None) -> None:
        """`render` is what `reward_model` sends of a response."""
        self._cfg = cfg
        self._setup = (
            WorkerSetup(
                custom_path=cfg.custom_rm_path, wall_limit_s=cfg.rm_timeout_s, cpu_limit_s=None, memory_limit_bytes=None
            )
            if cfg.custom_rm_path is not None
            else algebra_setup(min(WALL_LIMIT_S, cfg.rm_timeout_s))
        )
        self._watch = MarkerWatch()
        self._memory = VerdictMemory()
        self._counts: Counter[str] = Counter()
        self._processes: list[GraderProcess] = []
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._start_lock = asyncio.Lock()
        self._is_async = False
        self._is_closed = False
        self._num_logged_errors = 0
        self._programs = asyncio.Semaphore(cfg.rm_num_workers)
        self._remote: RemoteGrader | None = None
        self._model: RewardModelClient | None = None
        if cfg.rm_url is not None and render is not None:
            self._model = RewardModelClient(
                cfg.rm_url,
                render=render,
                batch_size=cfg.rm_batch_size,
                timeout_s=cfg.rm_timeout_s,
                max_retries=cfg.rm_max_retries,
            )
        if cfg.rm_url is not None:
            self._remote = RemoteGrader(cfg.rm_url, timeout_s=cfg.rm_timeout_s, max_retries=cfg.rm_max_retries)

    async def start(self) -> None:
        """Make sure that the custom function can be used: ConfigError, with its path and the remedy, when it cannot.

        Does nothing for built-in graders; their processes start with the first answer that needs algebra.
        """
        if self._cfg.custom_rm_path is not None:
            await self._start_processes()

    async def grade(self, sample: Sample, *, prompt: Prompt | None = None, evaluation: bool = False) -> GradeResult:
        """Reward of one finished sample; the sample itself is not changed.

        Raises RewardError only for what is wrong for every sample: an unknown grader, a missing `--reward-key`.
        """
        started = time.monotonic()
        detail: dict[str, Any] | None = None
        try:
            if self._cfg.custom_rm_path is None:
                value = await self._grade_built_in(sample, prompt)
            elif self._cfg.group_rm:
                (value,) = await self._ask_group([sample])
            else:
                value = await self._ask_custom(sample.response, sample)
            detail = value if isinstance(value, dict) else None
            reward = self._scalar(value, evaluation=evaluation)
        except _UnscoredError as error:
            return self._unscored(sample, error, detail, started)
        self._counts["graded"] += 1
        return GradeResult(reward=reward, detail=detail, seconds=time.monotonic() - started)

    async def grade_group(self, samples: Sequence[Sample], prompt: Prompt) -> list[GradeResult]:
        """Rewards of all finished samples of one prompt, by one call of the function of `--custom-rm-path`."""
        started = time.monotonic()
        try:
            values = await self._ask_group(samples)
        except _UnscoredError as error:
            return [self._unscored(sample, error, None, started) for sample in samples]
        results: list[GradeResult] = []
        for sample, value in zip(samples, values, strict=True):
            detail = value if isinstance(value, dict) else None
            try:
                reward = self._scalar(value, evaluation=False)
            except _UnscoredError as error:
                results.append(self._unscored(sample, error, detail, started))
                continue
            self._counts["graded"] += 1
            results.append(GradeResult(reward=reward, detail=detail, seconds=time.monotonic() - started))
        return results

    def _unscored(
        self, sample: Sample, error: _UnscoredError, detail: dict[str, Any] | None, started: float
    ) -> GradeResult:
        self._counts[error.reason] += 1
        self._report(sample, error)
        return GradeResult(
            reward=None, detail=detail, seconds=time.monotonic() - started, error=f"{error.reason}: {error}"
        )

    def counters(self) -> dict[str, int]:
        """Since the start: `graded`, each of UNSCORED_REASONS, `algebra_limit` and `processes_replaced`.

        `algebra_limit` counts answers that scored 0 because algebra gave up on them at its own limit.
        """
        return {name: self._counts[name] for name in _COUNTERS}

    def close(self) -> None:
        """End all processes. Gradings in flight end unscored."""
        self._is_closed = True
        for process in self._processes:
            process.close()

    async def aclose(self) -> None:
        """The same, and the connections to a reward server."""
        self.close()
        if self._remote is not None:
            await self._remote.close()
        if self._model is not None:
            await self._model.close()

    async def _grade_built_in(self, sample: Sample, prompt: Prompt | None) -> Any:
        name = resolve_rm_type(self._cfg.rm_type, sample.metadata)
        if name == "remote_rm":
            return await self._ask_remote(sample, prompt)
        if name == "reward_model":
            return await self._ask_model(sample, prompt)
        if name == "code":
            return await self._run_code(sample)
        arguments = (self._cfg.rm_type, sample.response, sample.label, sample.metadata, self._watch)
        is_long = len(sample.response) > _LONG_TEXT_CHARS
        try:
            verdict = await asyncio.to_thread(assess, *arguments) if is_long else assess(*arguments)
        except UnscorableError as error:
            raise _UnscoredError("error", str(error)) from error
        if not isinstance(verdict, AlgebraNeeded):
            return verdict
        for pair in verdict.pairs:
            known = self._memory.get(pair)
            if known is None:
                known = await self._ask_algebra(pair)
            if known:
                return 1.0
        return 0.0

    async def _ask_algebra(self, pair: tuple[str, str]) -> bool:
        try:
            verdict = (await self._call(*pair)).value is True
        except _UnscoredError as error:
            if error.reason != "timeout":
                raise
            # The expression is to blame, not the machine: the limit counts processor time. As in `grade`, what cannot
            # be shown to be equal scores 0.
            self._counts["algebra_limit"] += 1
            verdict = False
        self._memory.put(pair, verdict)
        return verdict

    async def _ask_remote(self, sample: Sample, prompt: Prompt | None) -> Any:
        if self._remote is None:
            raise RewardError("rm_type remote_rm asks a reward server; set --rm-url to its address")
        try:
            return await self._remote.grade(
                {
                    "prompt": prompt.text if prompt is not None else "",
                    "response": sample.response,
                    "label": sample.label,
                    "metadata": sample.metadata,
                }
            )
        except RemoteError as error:
            raise _UnscoredError("timeout" if error.is_timeout else "error", str(error)) from error

    async def _ask_model(self, sample: Sample, prompt: Prompt | None) -> float:
        if self._model is None or prompt is None:
            raise RewardError("rm_type reward_model asks a server for scores; set --rm-url and --rm-model")
        try:
            return await self._model.score(sample, prompt)
        except RemoteError as error:
            raise _UnscoredError("timeout" if error.is_timeout else "error", str(error)) from error
        except DataError as error:
            raise _UnscoredError("error", str(error)) from error

    async def _run_code(self, sample: Sample) -> float:
        try:
            tests = read_tests(sample.label, sample.metadata)
        except NoTestsError as error:
            raise _UnscoredError("error", str(error)) from error
        program = extract_program(sample.response)
        self._watch.note("code", "a fenced Python block", found=program is not None)
        if program is None:
            return 0.0
        limits = Limits(wall_s=self._cfg.rm_timeout_s, memory_bytes=self._cfg.rm_code_memory_bytes)
        async with self._programs:
            return float(await asyncio.to_thread(passes, program, tests, limits))

    async def _ask_group(self, samples: Sequence[Sample]) -> list[Any]:
        """One value a sample, by one call: label and metadata are the prompt's, the same for all."""
        values = await self._ask_custom([sample.response for sample in samples], samples[0])
        if not isinstance(values, list) or len(values) != len(samples):
            raise RewardError(
                f"--custom-rm-path {self._cfg.custom_rm_path} with --group-rm got {len(samples)} responses and must "
                f"return a list of as many rewards; it returned {str(values)[:200]}"
            )
        return values

    async def _ask_custom(self, responses: str | list[str], sample: Sample) -> Any:
        try:
            reply = await self._call(responses, sample.label, sample.metadata)
        except UnsendableError as error:
            raise _UnscoredError("error", f"label or metadata cannot be sent to a grader process: {error}") from error
        if reply.error is not None:
            raise _UnscoredError("error", reply.error)
        if reply.timed_out:
            raise _UnscoredError("timeout", f"took more than --rm-timeout-s {self._cfg.rm_timeout_s:g} s")
        return reply.value

    async def _call(self, *arguments: Any) -> Reply:
        """One request to a free process. A request whose process was lost to another one is sent once more."""
        if self._is_closed:
            raise _UnscoredError("crash", "the grader pool is closed")
        await self._start_processes()
        for attempt in range(2):
            index = await self._free.get()
            sent = time.monotonic()
            try:
                process = await self._serving_process(index)
                return await self._reply(process, *arguments)
            except WorkerLostError as error:
                if error.limit is not None:
                    raise _UnscoredError("timeout", f"took more than {self._setup.wall_limit_s:g} s") from error
                if attempt or time.monotonic() - sent >= self._setup.wall_limit_s:
                    raise _UnscoredError("crash", str(error)) from error
            finally:
                self._free.put_nowait(index)
        raise AssertionError("unreachable: the second attempt returns or raises")

    async def _reply(self, process: GraderProcess, *arguments: Any) -> Reply:
        future = process.submit(*arguments)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._setup.wall_limit_s + _GRACE_S)
        except asyncio.CancelledError:
            if not self._is_async:
                process.kill()  # still at work on this sample, whose fate must not be taken for that of the next one
            raise
        except TimeoutError:
            await asyncio.to_thread(process.kill)
            # A process cuts off a slow grading by itself, except where a coroutine function blocks its loop.
            raise _UnscoredError(
                "timeout",
                f"no answer after {self._setup.wall_limit_s + _GRACE_S:g} s; an `async` reward function must not "
                "block, make one that does a plain function",
            ) from None

    async def _start_processes(self) -> None:
        async with self._start_lock:
            if self._processes:
                return
            processes = [self._new_process() for _ in range(self._cfg.rm_num_workers)]
            try:
                ready = [await self._until_ready(process) for process in processes]
            except BaseException as error:
                for process in processes:
                    process.close()
                if isinstance(error, RewardError) and self._cfg.custom_rm_path is not None:
                    raise ConfigError(str(error)) from error
                raise
            self._processes = processes
            self._is_async = ready[0].is_async
            for _ in range(_ASYNC_REQUESTS_PER_PROCESS if self._is_async else 1):
                for index in range(len(processes)):
                    self._free.put_nowait(index)

    async def _serving_process(self, index: int) -> GraderProcess:
        if self._processes[index].is_lost:
            self._processes[index] = self._new_process()
            self._counts["processes_replaced"] += 1
        process = self._processes[index]
        try:
            await self._until_ready(process)
        except RewardError as error:
            raise _UnscoredError("crash", str(error)) from error
        return process

    async def _until_ready(self, process: GraderProcess) -> Any:
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(process.ready)), _START_TIMEOUT_S)
        except TimeoutError:
            raise RewardError(f"a grader process did not start within {_START_TIMEOUT_S:g} s") from None

    def _new_process(self) -> GraderProcess:
        return GraderProcess(self._setup, quiet=self._setup.custom_path is None)

    def _scalar(self, value: Any, *, evaluation: bool) -> float:
        """The number to train on, out of whatever the grader returned."""
        if isinstance(value, Mapping):
            value = self._pick(value, evaluation=evaluation)
        if value is None:
            raise _UnscoredError("none", "the reward function returned None")
        if not isinstance(value, bool | int | float):
            source = f"--custom-rm-path {self._cfg.custom_rm_path}"
            if self._cfg.custom_rm_path is None:
                source = f"the reward server {self._cfg.rm_url}"
            raise RewardError(
                f"{source} returned {value!r} of type {type(value).__name__}; return a number, a dict or None"
            )
        try:
            reward = float(value)
        except OverflowError:  # an integer, maybe too long to be printed
            raise _UnscoredError("not_finite", "the reward is an integer beyond the largest float") from None
        if not math.isfinite(reward):
            raise _UnscoredError("not_finite", f"the reward is {value}")
        return reward

    def _pick(self, value: Mapping[str, Any], *, evaluation: bool) -> Any:
        flag, key = "--reward-key", self._cfg.reward_key
        if evaluation and self._cfg.eval_reward_key is not None:
            flag, key = "--eval-reward-key", self._cfg.eval_reward_key
        present = ", ".join(map(repr, value)) or "no keys"
        if key is None:
            raise RewardError(
                f"the reward function returned a dict ({present}); set {flag} to the key that holds the reward"
            )
        if key not in value:
            raise RewardError(f"the reward function returned no {key!r} ({flag}); it returned {present}")
        return value[key]

    def _report(self, sample: Sample, error: _UnscoredError) -> None:
        self._num_logged_errors += 1
        if self._num_logged_errors > _MAX_LOGGED_ERRORS:
            return
        is_last = " (later ones are only counted)" if self._num_logged_errors == _MAX_LOGGED_ERRORS else ""
        logger.warning(
            "sample %d of group %d is unscored, %s: %s%s", sample.index, sample.group_id, error.reason, error, is_last
        )
