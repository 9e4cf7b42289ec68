"""Generation by a function of the user (`--custom-generate-function-path`): several turns, tools, fan-out.

Token in, token out: a response only ever grows at its end, by what the engine sampled or by tokens of the environment,
which are masked. Nothing that was sampled is tokenised a second time. Called by `collect.py`.
"""

import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence

from rlkit.config.hooks import HOOKS, load_function
from rlkit.data.tokenizer import Tokenizer
from rlkit.rollout.generator import Generator, Outcome
from rlkit.rollout.hooks import HookError
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Prompt, Sample, SampleStatus

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 5


class Turns:
    """What a generate function works with, for one sample. Limits of length hold over all turns together."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, sampling: SamplingParams, *, evaluation: bool
    ) -> None:
        self._generator = generator
        self._sampling = sampling
        self.tokenizer = tokenizer
        self.evaluation = evaluation
        """Whether the sample belongs to an evaluation."""
        self.outcome = Outcome()

    async def generate(self, sample: Sample, sampling: SamplingParams | None = None) -> bool:
        """One turn: the engine goes on where the sample ends.

        False where the sample is over, and the function should return: no room is left (TRUNCATED), generation is being
        cut off (ABORTED), or the engine failed (FAILED). `sampling` may differ from turn to turn, but its
        `max_new_tokens` stays the limit of the whole response.
        """
        outcome = await self._generator.generate(sample, sampling or self._sampling)
        reissued = self.outcome.num_reissued + outcome.num_reissued
        self.outcome = Outcome(num_reissued=reissued, error=outcome.error or self.outcome.error)
        return sample.status is SampleStatus.COMPLETED

    def append(self, sample: Sample, content: str | Sequence[int]) -> bool:
        """Add what the environment says, as text or as token ids, masked. False, and the sample is TRUNCATED, where it
        does not fit with a token to follow.
        """
        is_text = isinstance(content, str)
        ids = self.tokenizer.encode(content, add_special_tokens=False) if isinstance(content, str) else list(content)
        if self._generator.room(sample, self._sampling) <= len(ids):
            sample.status = SampleStatus.TRUNCATED
            return False
        sample.tokens.extend(ids)
        sample.loss_mask.extend([0] * len(ids))
        sample.rollout_logprobs.extend([0.0] * len(ids))
        sample.response += content if is_text else self.tokenizer.decode(ids)
        return True

    def fork(self, sample: Sample, *, prompt: str | Sequence[int] | None = None) -> Sample:
        """Another sample of the same rollout, without a response: of the same prompt, or of another one, such as a
        summary of what came before. Return every sample that is to be trained on, in a list.
        """
        if prompt is None:
            ids = sample.tokens[: sample.prompt_length]
        elif isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        else:
            ids = list(prompt)
        return Sample(
            group_id=sample.group_id,
            index=sample.index,
            seed=sample.seed,
            tokens=list(ids),
            prompt_length=len(ids),
            label=sample.label,
            metadata=sample.metadata,
        )


GenerateFunction = Callable[[Turns, Sample, SamplingParams], Awaitable[list[Sample] | None]]


class CustomResponder:
    """Calls the user's function for each sample and checks what it made."""

    def __init__(self, path: str, generator: Generator, tokenizer: Tokenizer) -> None:
        """ConfigError, with the right signature, where the function cannot be used."""
        self._path = path
        self._function: GenerateFunction = load_function(HOOKS["custom_generate_function_path"], path)
        self._generator = generator
        self._tokenizer = tokenizer
        self._num_logged = 0

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool, prompt: Prompt
    ) -> tuple[list[Sample], Outcome]:
        turns = Turns(self._generator, self._tokenizer, sampling, evaluation=evaluation)
        before = list(sample.tokens)
        try:
            made = await self._function(turns, sample, sampling)
        except Exception:  # the user's function: a tool that breaks costs its sample, and is told
            sample.status = SampleStatus.FAILED
            told = traceback.format_exc()
            self._log(sample, told)
            return [sample], Outcome(num_reissued=turns.outcome.num_reissued, error=f"{self._path} raised\n{told}")
        samples = [sample] if made is None else made
        self._check(samples, sample, before)
        return samples, turns.outcome

    def _check(self, samples: object, sample: Sample, before: list[int]) -> None:
        """HookError where the result breaks what everything behind it relies on."""
        where = f"--custom-generate-function-path {self._path}"
        if not isinstance(samples, list) or not samples or not all(isinstance(item, Sample) for item in samples):
            raise HookError(f"{where} must return None or a list of samples, it returned {str(samples)[:200]}")
        for item in samples:
            if (item.group_id, item.index) != (sample.group_id, sample.index):
                raise HookError(f"{where} returned a sample of another rollout; make further ones with turns.fork")
            lengths = (len(item.loss_mask), len(item.rollout_logprobs))
            if lengths != (item.response_length, item.response_length):
                raise HookError(
                    f"{where}: a sample has {item.response_length} response tokens, {lengths[0]} mask entries and "
                    f"{lengths[1]} log-probs; grow it with turns.generate and turns.append only"
                )
            if item.status is SampleStatus.PENDING:
                raise HookError(f"{where} returned a sample for which it never called turns.generate")
        if sample.tokens[: len(before)] != before:
            raise HookError(f"{where} changed tokens that were there before; a response only grows at its end")

    def _log(self, sample: Sample, told: str) -> None:
        self._num_logged += 1
        if self._num_logged <= MAX_LOGGED_ERRORS:
            last = " (later ones are only counted)" if self._num_logged == MAX_LOGGED_ERRORS else ""
            logger.warning(f"sample {sample.index} of group {sample.group_id} failed in {self._path}{last}:\n{told}")
