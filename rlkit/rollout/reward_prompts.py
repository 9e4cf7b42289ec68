"""What a reward model reads: the conversation with the response, in its own template and tokens. Called by
`manager.py` and `evaluate.py`."""

from rlkit.config.schema import ModelConfig, RewardConfig
from rlkit.data.tokenizer import Tokenizer, load_tokenizer
from rlkit.rewards.pool import GraderPool
from rlkit.types.errors import ConfigError, DataError
from rlkit.types.samples import Prompt, Sample


def grader_pool(cfg: RewardConfig) -> GraderPool:
    """The graders of a run, with the reward model's tokenizer where there is one. ConfigError where it has none."""
    if cfg.rm_model is None:
        return GraderPool(cfg)
    try:
        tokenizer = load_tokenizer(ModelConfig(hf_checkpoint=cfg.rm_model))
    except DataError as error:
        raise ConfigError(f"--rm-model {cfg.rm_model}: {error}") from error
    return GraderPool(cfg, render=RewardPrompts(tokenizer))


class RewardPrompts:
    """Renders by the chat template of the reward model; without one, prompt and response as they follow each other,
    and the end-of-sequence id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, sample: Sample, prompt: Prompt) -> list[int]:
        if self._tokenizer.chat_template is None:
            ids = self._tokenizer.encode(prompt.text + sample.response)
            eos = self._tokenizer.eos_token_id
            return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        asked = prompt.messages if prompt.messages is not None else [{"role": "user", "content": prompt.text}]
        messages = [*asked, {"role": "assistant", "content": sample.response}]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"row {prompt.position} of the prompt file: the reward model's chat template refuses it: {error}"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False)
