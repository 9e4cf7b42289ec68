"""Supervised samples: the label of a row is the response. Called by the rollout manager for `--loss-type sft_loss`.

Prompt and response are tokenised apart, as they are when a model generates: the response ids are what the policy would
have to sample behind the prompt ids, ending with the id that ends a turn.
"""

from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt, Sample, SampleStatus

_PROBE = "rlkit"


def fill_in_label(sample: Sample, prompt: Prompt, tokenizer: Tokenizer) -> None:
    """Make `sample` the completed response that `prompt.label` is; every response token is trained on, the prompt is
    not.

    The reward is 0: supervised samples have none, and None would mean "leave this out". DataError without a label text.
    """
    label = prompt.label
    if isinstance(label, bool) or not isinstance(label, str | int | float) or label == "":
        raise DataError(
            f"row {prompt.position} of the prompt file: the label is {label!r:.80}; "
            "supervised training needs the text of the response there (--label-key)"
        )
    text = str(label)
    response_ids = [*tokenizer.encode(text, add_special_tokens=False), turn_end_id(tokenizer)]
    sample.tokens = [*prompt.token_ids, *response_ids]
    sample.prompt_length = len(prompt.token_ids)
    sample.response = text
    sample.loss_mask = [1] * len(response_ids)
    sample.rollout_logprobs = []
    sample.status = SampleStatus.COMPLETED
    sample.reward = 0.0
    sample.label = label


def turn_end_id(tokenizer: Tokenizer) -> int:
    """The special token that the chat template puts behind an assistant's words, else the end-of-sequence token."""
    if tokenizer.chat_template is not None:
        conversation = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
        following = tokenizer.encode(rendered.rpartition(_PROBE)[2], add_special_tokens=False)
        special = set(tokenizer.all_special_ids)
        for token_id in following:
            if token_id in special:
                return token_id
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token and its chat template ends no turn; add eos_token")
    return tokenizer.eos_token_id
