"""Which parameters are trained: `--only-train-params-name-list` and `--freeze-params-name-list`. Used by the
backends.
"""

import re
from collections.abc import Sequence

from rlkit.config.schema import OptimizerConfig
from rlkit.types.errors import ConfigError


def trained_names(names: Sequence[str], cfg: OptimizerConfig) -> set[str]:
    """Those of `names` (Hugging Face parameter names) that get gradients.

    A regular expression may match anywhere in a name. ConfigError where one finds no parameter at all, or where none is
    left to train: a misspelt name would freeze nothing, or everything, in silence.
    """
    patterns = cfg.only_train_params_name_list or cfg.freeze_params_name_list
    flag = "--only-train-params-name-list" if cfg.only_train_params_name_list else "--freeze-params-name-list"
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if re.search(pattern, name)}
        if not matching:
            raise ConfigError(
                f"{flag} {pattern!r} matches none of the {len(names)} parameters; one is called {names[0]}"
            )
        found |= matching
    trained = found if cfg.only_train_params_name_list else set(names) - found
    if not trained:
        raise ConfigError(f"{flag} {' '.join(patterns)} leaves no parameter to train")
    return trained
