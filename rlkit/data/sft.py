"""Supervised samples: responses that stand in the data. Called by the rollout manager for `--loss-type sft_loss` and
`dpo_loss`.

A response is a text, or a list of messages that continues the prompt's conversation. Prompt and response are tokenised
apart, as they are when a model generates: the response ids are what the policy would have to sample behind the prompt
ids, ending with the id that ends a turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.data.conversations import checked_messages, tokenize_conversation, turn_end_id
from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt, Sample, SampleStatus

__all__ = ["fill_in_label", "fill_in_pair", "turn_end_id"]


def fill_in_label(
    sample: Sample, prompt: Prompt, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Make `sample` the completed response that `prompt.label` is. Trained is all that an assistant says in it, the
    prompt is not.

    The reward is 0: supervised samples have none, and None would mean "leave this out". DataError without a response.
    """
    _fill_in(sample, prompt, prompt.label, tokenizer, template_kwargs or {}, remedy="(--label-key)")


def fill_in_pair(
    samples: Sequence[Sample], prompt: Prompt, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """The same for the chosen and the rejected response of `prompt.label`, in this order."""
    for name, sample in zip(("chosen", "rejected"), samples, strict=True):
        remedy = f"(--{name}-key)"
        _fill_in(sample, prompt, prompt.label[name], tokenizer, template_kwargs or {}, remedy=remedy)
    if samples[0].tokens == samples[1].tokens:
        raise DataError(f"{_place(prompt)}: the chosen and the rejected response are the same")


def _fill_in(
    sample: Sample,
    prompt: Prompt,
    label: Any,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    *,
    remedy: str,
) -> None:
    if isinstance(label, list):
        conversation = _continued(prompt, label, remedy)
        done = tokenize_conversation(
            conversation,
            tokenizer,
            num_given=len(prompt.messages or ()),
            tools=prompt.metadata.get("tools"),
            template_kwargs=template_kwargs,
            place=_place(prompt),
        )
        sample.tokens = done.token_ids
        sample.prompt_length = done.prompt_length
        sample.loss_mask = done.loss_mask[done.prompt_length :]
        sample.response = done.text
    else:
        if isinstance(label, bool) or not isinstance(label, str | int | float) or label == "":
            raise DataError(
                f"{_place(prompt)}: the label is {label!r:.80}; "
                f"supervised training needs the text of the response there {remedy}"
            )
        text = str(label)
        response_ids = [*tokenizer.encode(text, add_special_tokens=False), turn_end_id(tokenizer)]
        sample.tokens = [*prompt.token_ids, *response_ids]
        sample.prompt_length = len(prompt.token_ids)
        sample.loss_mask = [1] * len(response_ids)
        sample.response = text
    sample.rollout_logprobs = []
    sample.status = SampleStatus.COMPLETED
    sample.reward = 0.0
    sample.label = label


def _continued(prompt: Prompt, label: list[Any], remedy: str) -> list[dict[str, Any]]:
    """The prompt's messages and those of the response, which may repeat them."""
    if prompt.messages is None:
        raise DataError(
            f"{_place(prompt)}: the response {remedy} is a list of messages, and the prompt is plain text; "
            "add --apply-chat-template"
        )
    answers = checked_messages(label, _place(prompt), f"the response {remedy}")
    num_given = len(prompt.messages)
    if answers[:num_given] == prompt.messages:
        answers = answers[num_given:]
    return [*prompt.messages, *answers]


def _place(prompt: Prompt) -> str:
    return f"row {prompt.position} of the prompt file"
