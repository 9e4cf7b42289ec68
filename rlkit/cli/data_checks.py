"""What a run's prompt files hold, looked at before anything starts. Called by `entry.py`; numpy, no torch."""

from collections.abc import Iterator

from rlkit.config.eval_sets import eval_sets
from rlkit.config.rules.required import evaluates, reads_prompts
from rlkit.config.schema import RunConfig
from rlkit.data.prompts import GivenResponses, PromptSource
from rlkit.data.rows import open_rows
from rlkit.data.tokenizer import load_tokenizer
from rlkit.types.errors import ConfigError


def check_rows(cfg: RunConfig) -> None:
    """ConfigError for a prompt file, or a slice of one, without any row; DataError where one cannot be read."""
    for name, path in _files(cfg):
        rows = open_rows(path)
        if len(rows) == 0:
            held = f"its file has {rows.num_rows_in_file}" if rows.num_rows_in_file else "its file is empty"
            raise ConfigError(f"{name} = {path} holds no row; {held}: correct --{name.replace('_', '-')}")
        rows.close()


def num_rows_of_an_epoch(cfg: RunConfig) -> int:
    """Rows that one pass over `--prompt-data` trains on: those that are too long for `--rollout-max-prompt-len` are
    left out. Where there is such a limit every row is tokenised.
    """
    assert cfg.data.prompt_data is not None
    if cfg.data.rollout_max_prompt_len is None:
        rows = open_rows(cfg.data.prompt_data)
        rows.close()
        return len(rows)
    source = PromptSource(cfg.data, load_tokenizer(cfg.model), given=GivenResponses.of(cfg))
    return source.num_fitting_rows()


def _files(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    if reads_prompts(cfg) and cfg.data.prompt_data:
        yield "prompt_data", cfg.data.prompt_data
    if evaluates(cfg):
        name = "eval_config" if cfg.evaluation.eval_config is not None else "eval_prompt_data"
        yield from ((name, item.path) for item in eval_sets(cfg))
