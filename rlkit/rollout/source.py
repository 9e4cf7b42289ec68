"""Where the groups of a step come from: those that wait since an earlier step, then new prompts. Called by
`manager.py`.

Invariant: every prompt that was drawn is either in a group that was handed out and not returned, or waits here; the
waiting groups are part of `state()`, so a resumed run neither skips nor repeats one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlkit.config.schema import RunConfig
from rlkit.data.prompts import PromptSource
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.rollout.collect import open_group
from rlkit.rollout.debug_data import group_from_fields
from rlkit.rollout.hooks import BufferFilter, WaitingGroup, load_buffer_filter
from rlkit.types.samples import SampleGroup


class GroupSource:
    """Hands out groups to generate, and takes back those that were cut off."""

    def __init__(self, cfg: RunConfig, prompts: PromptSource, ledger: Ledger) -> None:
        """ConfigError where the function of `--buffer-filter-path` cannot be used."""
        self._cfg = cfg
        self._prompts = prompts
        self._ledger = ledger
        self._choose: BufferFilter = load_buffer_filter(cfg.rollout.buffer_filter_path)
        self._waiting: list[WaitingGroup] = []
        self._next_group_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next(self, num_groups: int, step: int) -> list[WaitingGroup]:
        """Groups to generate in this step. New ones hold their prompt only; continued ones what they hold already."""
        taken = self._choose(self._waiting, num_groups, step) if self._waiting else []
        chosen = {id(item) for item in taken}
        self._waiting = [item for item in self._waiting if id(item) not in chosen]
        for item in taken:
            item.num_continued += any(sample.response_length > 0 for sample in item.group.samples)
            if self._cfg.rollout.mask_offpolicy_in_partial_rollout:
                mask_offpolicy(item.group)
        return taken + self._draw(num_groups - len(taken), step)

    def put_back(self, cut_off: Sequence[WaitingGroup]) -> None:
        """Keep groups for a later step: with what they hold (`--partial-rollout`), else as if never started."""
        for item in cut_off:
            self._waiting.append(item if self._keeps(item.group) else self._anew(item))
        self._waiting.sort(key=lambda item: (item.first_step, item.group.group_id))

    def state(self, held: Sequence[WaitingGroup] = ()) -> dict[str, Any]:
        """As JSON: the place in the prompt file, the next group id, and the groups that wait. `held`: groups that were
        handed out and are still in the making; finished ones are kept, the others start anew after a resume.
        """
        made = [item if is_finished(item.group) else self._anew(item) for item in held]
        return {
            "prompts": self._prompts.state(),
            "next_group_id": self._next_group_id,
            "waiting": [dataclasses.asdict(item) for item in [*self._waiting, *made]],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken. Groups that wait are started anew, except that `--partial-rollout` keeps
        what they hold, and `--async-mode full` finished ones.
        """
        self._prompts.load_state(state["prompts"])
        self._next_group_id = state["next_group_id"]
        self._waiting = []
        self.put_back(
            [
                WaitingGroup(
                    group=group_from_fields(item["group"], "rollout_state.json of the checkpoint"),
                    first_step=item["first_step"],
                    num_continued=item["num_continued"],
                )
                for item in state.get("waiting", [])  # checkpoints of version 0.1 have none
            ]
        )

    def _draw(self, num_groups: int, step: int) -> list[WaitingGroup]:
        if num_groups <= 0:
            return []
        before = self._prompts.place()
        prompts = self._prompts.next(num_groups)
        after = self._prompts.place()
        self._ledger.write(
            LedgerEvent.DRAWN,
            step=step,
            first_group=self._next_group_id,
            num_groups=len(prompts),
            begin=[before.epoch, before.drawn],
            end=[after.epoch, after.drawn],
            too_long=after.num_too_long - before.num_too_long,
            num_rows=len(self._prompts),
        )
        drawn: list[WaitingGroup] = []
        for prompt in prompts:
            group = open_group(
                prompt,
                self._next_group_id,
                self._cfg.rollout.n_samples_per_prompt,
                run_seed=self._cfg.data.rollout_seed,
            )
            drawn.append(WaitingGroup(group=group, first_step=step))
            self._next_group_id += 1
        return drawn

    def _keeps(self, group: SampleGroup) -> bool:
        """Whether a group that waits goes on with what it holds."""
        if self._cfg.async_training.is_full:
            return is_finished(group)
        # with masks, a later step could train on no token of a finished group
        would_be_masked = is_finished(group) and self._cfg.rollout.mask_offpolicy_in_partial_rollout
        return self._cfg.rollout.partial_rollout and not would_be_masked

    def _anew(self, item: WaitingGroup) -> WaitingGroup:
        return dataclasses.replace(item, group=self._started_anew(item.group), num_continued=0)

    def _started_anew(self, group: SampleGroup) -> SampleGroup:
        """The same group, with the same seeds, and nothing generated."""
        size, seed = self._cfg.rollout.n_samples_per_prompt, self._cfg.data.rollout_seed
        return open_group(group.prompt, group.group_id, size, run_seed=seed)


def is_finished(group: SampleGroup) -> bool:
    """Whether every response is there."""
    return all(sample.status.is_trainable for sample in group.samples)


def mask_offpolicy(group: SampleGroup) -> None:
    """Take every token that the group holds out of the loss: older weights sampled it. The mask stays as long as the
    response, and grows with it.
    """
    for sample in group.samples:
        sample.loss_mask = [0] * sample.response_length
