"""The stream of prompts that a run trains on, and the prompts of an evaluation set. Called by the rollout manager.

Invariants: the order of an epoch is a function of (seed, epoch); `state()` and `load_state()` continue it exactly; a
row is never cut, and a row that is too long is left out, counted and reported.
"""

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlkit.config.schema import DataConfig, RunConfig
from rlkit.data.conversations import checked_messages, split_conversation
from rlkit.data.rendering import PromptRenderer, check_unicode, required
from rlkit.data.rows import open_rows
from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt

logger = logging.getLogger(__name__)

_STATE_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in the stream of prompts."""

    epoch: int
    drawn: int
    """Rows of the epoch that are behind it."""
    num_too_long: int
    """Rows left out so far, over all epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenResponses:
    """Where the responses of supervised rows stand."""

    pair_keys: tuple[str, str] | None = None
    """Columns of the chosen and of the rejected response; None where a row has one response."""

    @classmethod
    def of(cls, cfg: RunConfig) -> "GivenResponses | None":
        """None where responses are generated."""
        if not cfg.is_supervised:
            return None
        return cls(pair_keys=(cfg.dpo.chosen_key, cfg.dpo.rejected_key) if cfg.is_dpo else None)


class PromptSource:
    """Endless prompts from the file of `--prompt-data`, epoch after epoch. Rows are read and tokenised when drawn."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: Tokenizer,
        *,
        given: GivenResponses | None = None,
        keeps_messages: bool = False,
    ) -> None:
        """Open the file. DataError when it cannot be read, has no rows, or its first row does not fit the flags.
        `keeps_messages`: prompts hold their messages, for an agent; those of given responses always do."""
        if cfg.prompt_data is None:
            raise DataError("there is no prompt file; pass --prompt-data FILE.jsonl")
        self._cfg = cfg
        self._given = given
        self._keeps_messages = keeps_messages or given is not None
        self._rows = open_rows(cfg.prompt_data)
        self._renderer = PromptRenderer(cfg, tokenizer)
        if not len(self._rows):
            held = self._rows.num_rows_in_file
            raise DataError(f"--prompt-data {cfg.prompt_data}: no rows" + (f"; the file has {held}" if held else ""))
        self._epoch = 0
        self._drawn = 0
        self._order = self._order_of(0)
        self._num_too_long = 0
        self._row_to_prompt(0, epoch=0)  # a wrong key is said at the start, not after minutes of loading models

    def __len__(self) -> int:
        """Rows of an epoch, the ones that are too long included."""
        return len(self._rows)

    @property
    def num_too_long(self) -> int:
        """Draws so far that `--rollout-max-prompt-len` left out."""
        return self._num_too_long

    def num_fitting_rows(self) -> int:
        """Rows of an epoch that are not too long. Reads and tokenises all of them."""
        limit = self._cfg.rollout_max_prompt_len
        if limit is None:
            return len(self)
        return sum(len(self._row_to_prompt(row, epoch=0).token_ids) <= limit for row in range(len(self)))

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, over the end of an epoch if need be. DataError when a whole epoch is too long."""
        prompts: list[Prompt] = []
        left_out_in_a_row = 0
        while len(prompts) < num_prompts:
            prompt = self._draw()
            if prompt is not None:
                prompts.append(prompt)
                left_out_in_a_row = 0
                continue
            left_out_in_a_row += 1
            if left_out_in_a_row >= len(self):
                raise DataError(
                    f"--prompt-data {self._cfg.prompt_data}: every one of its {len(self)} rows is longer than "
                    f"--rollout-max-prompt-len {self._cfg.rollout_max_prompt_len} tokens"
                )
        return prompts

    def state(self) -> dict[str, Any]:
        """The place in the stream, and what it depends on, as JSON."""
        return {
            "format": _STATE_FORMAT,
            **self._identity(),
            "epoch": self._epoch,
            "drawn": self._drawn,
            "num_too_long": self._num_too_long,
        }

    def place(self) -> Place:
        """Where the next prompt comes from."""
        return Place(epoch=self._epoch, drawn=self._drawn, num_too_long=self._num_too_long)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        DataError when the content of the file, its slice, the seed or the shuffling has changed since.
        """
        if state.get("format") != _STATE_FORMAT:
            found = state.get("format")
            raise DataError(f"the place in the prompt file has format {found!r}, this version reads {_STATE_FORMAT}")
        for what, now in self._identity().items():
            if state[what] != now:
                raise DataError(
                    f"--prompt-data {self._cfg.prompt_data}: {what} was {state[what]!r} when the checkpoint was saved "
                    f"and is {now!r} now, so its place in the data means nothing; restore it, or start a new run "
                    "from those weights: --finetune --load DIR, where DIR holds the checkpoint"
                )
        self._epoch, self._drawn, self._num_too_long = state["epoch"], state["drawn"], state["num_too_long"]
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        """All that decides which row comes when; a place in the stream is valid for the same identity only."""
        return {
            "content": self._rows.fingerprint,
            "rows": [self._rows.start, self._rows.stop],
            "shuffle": self._cfg.rollout_shuffle,
            "seed": self._cfg.rollout_seed if self._cfg.rollout_shuffle else None,
        }

    def _draw(self) -> Prompt | None:
        """The next row as a prompt, or None when it is too long."""
        if self._drawn == len(self):
            self._begin_epoch(self._epoch + 1)
        position = self._drawn if self._order is None else int(self._order[self._drawn])
        prompt = self._row_to_prompt(position, epoch=self._epoch)
        self._drawn += 1
        limit = self._cfg.rollout_max_prompt_len
        if limit is None or len(prompt.token_ids) <= limit:
            return prompt
        self._num_too_long += 1
        if self._num_too_long == 1:
            logger.warning(
                f"{self._rows.place(position)}: a prompt of {len(prompt.token_ids)} tokens is left out, "
                f"--rollout-max-prompt-len is {limit}; further ones are counted"
            )
        return None

    def _begin_epoch(self, epoch: int) -> None:
        if self._num_too_long:
            told = f"{self._num_too_long} prompts were too long so far, of {len(self)} rows an epoch"
            logger.info(f"end of epoch {self._epoch}: {told}")
        self._epoch, self._drawn = epoch, 0
        self._order = self._order_of(epoch)

    def _row_to_prompt(self, position: int, *, epoch: int) -> Prompt:
        row, place = self._rows[position], self._rows.place(position)
        row, label = self._label(row, place)
        check_unicode(label, f"{place}: {self._cfg.label_key or self._cfg.input_key!r}")
        text, token_ids = self._renderer.render(row, place)
        metadata = self._renderer.metadata(row, place)
        check_unicode(metadata, f"{place}: {self._cfg.metadata_key!r}")
        return Prompt(
            position=position,
            epoch=epoch,
            token_ids=token_ids,
            text=text,
            label=label,
            metadata=metadata,
            messages=self._renderer.messages(row, place) if self._keeps_messages else None,
        )

    def _label(self, row: dict[str, Any], place: str) -> tuple[dict[str, Any], Any]:
        """(row whose input column is the prompt, label). Of a conversation the label is what follows the prompt."""
        if self._given is not None and self._given.pair_keys is not None:
            keys = zip(("chosen", "rejected"), self._given.pair_keys, strict=True)
            return row, {name: required(row, key, f"--{name}-key", place) for name, key in keys}
        if self._cfg.label_key is not None:
            return row, required(row, self._cfg.label_key, "--label-key", place)
        if self._given is None:
            return row, None
        key = self._cfg.input_key
        messages = checked_messages(required(row, key, "--input-key", place), place, key)
        first = split_conversation(messages, place, key)
        return {**row, key: messages[:first]}, messages[first:]

    def _order_of(self, epoch: int) -> np.ndarray | None:
        """Row positions in the order of an epoch; None is the order of the file."""
        if not self._cfg.rollout_shuffle:
            return None
        seed = hashlib.blake2b(f"{self._cfg.rollout_seed}/{epoch}".encode(), digest_size=4).digest()
        # RandomState, because NumPy promises that its stream never changes; a resumed run may meet a newer NumPy.
        return np.random.RandomState(int.from_bytes(seed, "big")).permutation(len(self))


def load_prompts(
    path: str,
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    keeps_messages: bool = False,
) -> list[Prompt]:
    """All prompts of an evaluation file in its order, rendered like the training prompts.

    `path` may carry a slice. Rows longer than `--rollout-max-prompt-len` are left out, with a warning that counts them.
    """
    own = replace(
        cfg,
        prompt_data=path,
        input_key=input_key or cfg.input_key,
        label_key=label_key or cfg.label_key,
        rollout_shuffle=False,
    )
    source = PromptSource(own, tokenizer, keeps_messages=keeps_messages)
    prompts = [prompt for _ in range(len(source)) if (prompt := source._draw()) is not None]
    left_out = f"{source.num_too_long} of {len(source)} rows are longer than --rollout-max-prompt-len"
    if not prompts:
        raise DataError(f"{path}: {left_out} {cfg.rollout_max_prompt_len}; none is left")
    if source.num_too_long:
        logger.warning(f"{path}: {left_out} {cfg.rollout_max_prompt_len} and left out")
    return prompts
