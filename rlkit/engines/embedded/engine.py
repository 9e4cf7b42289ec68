"""The engine thread: takes requests and commands from an inbox, runs one forward pass after the other, delivers tokens.

HTTP handlers (`app.py`) live on an event loop in another thread and reach this one through `submit` and `call` only,
so nothing here needs a lock. Commands run between two passes.

As in SGLang, an update that comes while the engine is not paused waits until everything in flight has ended, and
requests that come meanwhile, or while the engine is paused, are held back.
"""

import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlkit.algo.batch_invariant import token_log_probs
from rlkit.engines.embedded.model import ModelRunner
from rlkit.engines.embedded.request import EngineRequest, Output, aborted
from rlkit.engines.embedded.sampling import SamplingBatch, sample, uniform_numbers
from rlkit.engines.embedded.scheduler import PlannedPiece, Ready, Scheduler
from rlkit.engines.embedded.scoring import add_input_logprobs, prompt_piece
from rlkit.engines.embedded.weights import WeightStore
from rlkit.types.errors import EngineError

logger = logging.getLogger(__name__)

FLUSH_POLL_S = 0.05
"""How often the deadline of a waiting flush is looked at while nothing else happens."""

HELD_ABORT_STATUS = 499
"""What SGLang answers to a request that is aborted before it has been queued."""

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    run: Callable[[], Any]
    future: Future[Any]
    needs_idle: bool
    """Not before everything in flight has ended, unless the engine is paused."""


class Engine:
    """Owner of model, cache, weights and queue. Public attributes are for the engine thread, i.e. inside `call`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        weight_version: str,
        max_running_requests: int,
        max_total_tokens: int,
        prefill_tokens: int,
        deliver: Callable[[list[Output]], None],
        on_crash: Callable[[], None],
    ) -> None:
        """`deliver` gets the outputs of one pass, on the engine thread. `on_crash` is called after an error that was
        logged; the engine is unusable then."""
        self.runner = runner
        self.weights = WeightStore(runner.model)
        self.weight_version = weight_version
        self.scheduler: Scheduler[Tensor] = Scheduler(
            max_running=max_running_requests,
            max_total_tokens=max_total_tokens,
            move_slot=lambda source, target, length: runner.cache.copy_slot(source, [target], length),
        )
        runner.cache.max_tokens = max_total_tokens
        self.asleep: set[str] = set()
        self.is_paused = False
        self._prefill_tokens = prefill_tokens
        self._deliver = deliver
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[EngineRequest | Command | None] = queue.SimpleQueue()
        self._held: deque[EngineRequest] = deque()
        self._deferred: deque[Command] = deque()
        self._flush: tuple[Future[None], float] | None = None
        self._outputs: list[Output] = []
        self._batch: tuple[list[EngineRequest], SamplingBatch] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from other threads.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return after the current pass."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, request: EngineRequest) -> None:
        self._inbox.put(request)

    def call(self, run: Callable[[], Any], *, needs_idle: bool = False) -> Future[Any]:
        """Run a function on the engine thread between two passes; an EngineError becomes the future's."""
        command = Command(run=run, future=Future(), needs_idle=needs_idle)
        self._inbox.put(command)
        return command.future

    def load(self) -> tuple[int, int, int]:
        """(running, waiting, tokens in slots); read without waiting, so it may be one pass old."""
        running = list(self.scheduler.running)
        return len(running), len(self.scheduler.waiting), sum(request.num_tokens for request in running)

    # Commands; on the engine thread.

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        self.is_paused = True
        match mode:
            case "abort":
                self.abort(lambda _: True)
            case "retract":
                self.scheduler.retract_all()
            case "in_place":
                pass

    def resume(self) -> None:
        self.is_paused = False

    def abort(self, is_meant: Callable[[EngineRequest], bool]) -> None:
        for request in self.scheduler.abort(is_meant):
            self._output(request)
        for request in [request for request in self._held if is_meant(request)]:
            self._held.remove(request)
            self._refuse(request, f"Request {request.rid} was aborted", status_code=HELD_ABORT_STATUS)

    def flush_cache(self, timeout_s: float) -> Future[None]:
        """Done once the engine is idle; EngineError after the timeout. Nothing cached outlives its request, so there
        is nothing to empty."""
        result: Future[None] = Future()
        if self._flush is not None:
            result.set_exception(EngineError("Another flush_cache is already in progress."))
        elif self.scheduler.is_idle:
            result.set_result(None)
        elif timeout_s <= 0:
            result.set_exception(EngineError(f"Flush cache failed. {self._pending_message()}"))
        else:
            self._flush = (result, time.monotonic() + timeout_s)
        return result

    def require_idle(self, what: str) -> None:
        if not self.scheduler.is_idle:
            raise EngineError(f"{what} needs an idle engine. {self._pending_message()}")

    def _pending_message(self) -> str:
        running, waiting, _ = self.load()
        return f"There are pending requests: #queue-req: {waiting}, #running-req: {running}"

    def release_memory(self, tags: Sequence[str] | None) -> None:
        tags = self._known_tags(tags)
        self.require_idle("release_memory_occupation")
        if already := self.asleep.intersection(tags):
            raise EngineError(f"released already: {sorted(already)}")
        if "kv_cache" in tags:
            self.runner.cache.free()
        if "weights" in tags:
            self.weights.sleep()
        self.asleep |= set(tags)
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()  # whoever shares the GPU needs the blocks now

    def resume_memory(self, tags: Sequence[str] | None) -> None:
        tags = self._known_tags(tags)
        if awake := set(tags) - self.asleep:
            raise EngineError(f"not released: {sorted(awake)}")
        if "weights" in tags:
            self.weights.wake()
        self.asleep -= set(tags)

    @staticmethod
    def _known_tags(tags: Sequence[str] | None) -> Sequence[str]:
        if unknown := set(tags or ()) - set(MEMORY_TAGS):
            raise EngineError(f"unknown memory tags {sorted(unknown)}; there are {list(MEMORY_TAGS)}")
        return tags or MEMORY_TAGS

    def update_weights(self, load: Callable[[], None], *, version: str | None, flush_cache: bool) -> None:
        """Run `load`, which writes into `weights`, and forget every cached prompt."""
        if flush_cache:
            self.require_idle("flush_cache after an update")
        if "weights" in self.asleep:
            raise EngineError("weights are released; resume_memory_occupation with the tag weights first")
        self.scheduler.forget_shared()
        load()
        if version is not None:
            self.weight_version = version

    def check_weights(self, action: str) -> dict[str, Any]:
        """The `ranks` and `per_engine_checksum` of a `/weights_checker` answer; empty for actions without them."""
        payload = self.weights.checker(action)
        if payload is None:
            return {}
        overall = hashlib.sha256(payload["per_gpu_checksum"].encode()).hexdigest()
        return {"ranks": [payload], "per_engine_checksum": overall}

    # The loop.

    def _run(self) -> None:
        try:
            if self.runner.device.type == "cuda":
                torch.cuda.set_device(self.runner.device)
            torch.set_num_threads(torch.get_num_threads())  # the OpenMP setting belongs to a thread
            with torch.inference_mode():
                while self._take_inbox():
                    self._after_commands()
                    if self._can_run:
                        self._step()
                    self._hand_out()
        except BaseException:
            logger.exception("the engine thread failed")
            self._on_crash()

    @property
    def _can_run(self) -> bool:
        return not self.is_paused and not self.scheduler.is_idle

    def _take_inbox(self) -> bool:
        """Carry out what has come in; waits while there is nothing to run. False when told to stop."""
        waits = not self._can_run and not self._deferred
        while True:
            try:
                item = self._inbox.get(block=waits, timeout=None if self._flush is None else FLUSH_POLL_S)
            except queue.Empty:
                return True
            waits = False
            match item:
                case None:
                    return False
                case EngineRequest():
                    self._accept(item)
                case Command(needs_idle=True):
                    self._deferred.append(item)
                case Command():
                    self._execute(item)

    def _accept(self, request: EngineRequest) -> None:
        if self.asleep & {"weights", "kv_cache"}:
            self._refuse(request, f"the engine sleeps: {sorted(self.asleep)} are released")
        elif self.weights.stale:
            self._refuse(request, f"{len(self.weights.stale)} tensors hold nothing since the engine slept; load them")
        elif self.is_paused or self._deferred:
            self._held.append(request)
        else:
            self.scheduler.add(request)

    def _refuse(self, request: EngineRequest, message: str, *, status_code: int = 503) -> None:
        request.finish = aborted(message, status_code=status_code)
        self._output(request)

    def _after_commands(self) -> None:
        while self._deferred and (self.is_paused or self.scheduler.is_idle):
            self._execute(self._deferred.popleft())
        if self._held and not self.is_paused and not self._deferred:
            held, self._held = self._held, deque()
            for request in held:
                self._accept(request)
        if self._flush is not None:
            result, deadline = self._flush
            if self.scheduler.is_idle:
                self._flush = None
                result.set_result(None)
            elif time.monotonic() > deadline:
                self._flush = None
                result.set_exception(EngineError("Timed out waiting for idle state."))

    @staticmethod
    def _execute(command: Command) -> None:
        try:
            result = command.run()
        except EngineError as error:
            command.future.set_exception(error)
        else:
            command.future.set_result(result)

    def _hand_out(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    # One pass.

    def _step(self) -> None:
        """Prefill while there is something to prefill, so that decode batches are large; else one decode step."""
        self._start(self.scheduler.admit())
        pieces = self.scheduler.plan_prefill(self._prefill_tokens)
        if pieces:
            self._prefill(pieces)
        elif self.scheduler.running:
            self.scheduler.keep_within_budget()
            self._decode()

    def _prefill(self, pieces: list[PlannedPiece]) -> None:
        running = self.scheduler.running
        self.runner.cache.reserve(len(running), max(request.num_tokens for request in running) + 1)
        planned = [prompt_piece(piece) for piece in pieces]
        logits_RV = self.runner.prefill(planned)
        ready: list[Ready[Tensor]] = []
        end = 0
        for piece, plan in zip(pieces, planned, strict=True):
            start, end = end, end + len(plan.logit_rows)
            if piece.request.wants_input_logprobs:
                add_input_logprobs(piece, logits_RV[start:end])
            # A copy: the row would keep the whole pass's logits alive.
            ready += self.scheduler.finish_piece(piece, lambda row=end - 1: logits_RV[row].clone())
        self._start(ready)

    def _start(self, ready: list[Ready[Tensor]]) -> None:
        """Fill the slots of requests whose prompt another slot holds, and sample everyone's first token."""
        if not ready:
            return
        running = self.scheduler.running
        self.runner.cache.reserve(len(running), max(request.num_tokens for request in running) + 1)
        copies: dict[EngineRequest, list[EngineRequest]] = {}
        for entry in ready:
            if entry.source is not entry.request:
                copies.setdefault(entry.source, []).append(entry.request)
        for source, targets in copies.items():
            slots = [request.slot for request in targets]
            self.runner.cache.copy_slot(source.slot, slots, targets[0].num_computed)
        empty = [entry.request for entry in ready if entry.request.sampling.max_new_tokens == 0]
        for request in empty:
            request.finish = {"type": "length", "length": 0}
        self._finish(empty)
        ready = [entry for entry in ready if entry.request.finish is None]
        if ready:
            requests = [entry.request for entry in ready]
            rows = [entry.next_logits for entry in ready]
            self._sample(requests, torch.stack(rows), self._sampling_batch(requests))

    def _decode(self) -> None:
        running = self.scheduler.running
        lengths = [request.num_computed for request in running]
        self.runner.cache.reserve(len(running), max(lengths) + 1)
        logits_BV = self.runner.decode([request.output_ids[-1] for request in running], lengths)
        for request in running:
            request.num_computed += 1
        if self._batch is None or self._batch[0] != running:
            self._batch = (list(running), self._sampling_batch(running))
        self._sample(self._batch[0], logits_BV, self._batch[1])

    def _sampling_batch(self, requests: Sequence[EngineRequest]) -> SamplingBatch:
        rows = [request.sampling for request in requests]
        return SamplingBatch.build(rows, vocab_size=self.runner.vocab_size, device=self.runner.device)

    def _sample(self, requests: list[EngineRequest], logits_BV: Tensor, batch: SamplingBatch) -> None:
        for row, request in enumerate(requests):
            if len(request.output_ids) < request.sampling.min_new_tokens:
                logits_BV[row, request.suppressed_ids] = -torch.inf
        uniform = uniform_numbers([request.seed for request in requests], [request.num_tokens for request in requests])
        tokens_B, logprobs_B = sample(logits_BV, batch, torch.from_numpy(uniform).to(logits_BV.device))
        if self.runner.is_batch_invariant:
            logprobs_B = token_log_probs(logits_BV, tokens_B, batch.temperature_B1)
        finished: list[EngineRequest] = []
        for request, token, logprob in zip(requests, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            if logprob != logprob:  # NaN
                request.finish = aborted("logits are not finite; are the weights?", status_code=500)
            else:
                request.output_ids.append(token)
                request.logprobs.append(logprob)
                request.check_finished()
            if request.finish is not None:
                finished.append(request)
            elif request.stream:
                self._output(request)
        self._finish(finished)

    def _finish(self, requests: list[EngineRequest]) -> None:
        self.scheduler.release_finished(requests)
        for request in requests:
            self._output(request)

    def _output(self, request: EngineRequest) -> None:
        if request.finish is not None:
            request.latency_s = time.perf_counter() - request.arrival_s
        self._outputs.append(
            Output(
                request=request,
                text=request.text_so_far(),
                num_output=len(request.output_ids),
                weight_version=self.weight_version,
                finish=request.finish,
            )
        )
