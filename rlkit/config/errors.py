"""The base of every deliberate error, and the one about the user's input.

They live on the lowest layer so that `config/` can raise them; `rlkit.types.errors` lists them beside all the others,
and that is where the rest of the package imports them from.
"""


class RlkitError(Exception):
    """Base of every deliberate error. The message alone is the state, so instances pickle."""


class GuardError(RlkitError, RuntimeError):
    """A guard against silent failure fired under `--strict-guards`. The message names evidence and remedy."""


class ConfigError(RlkitError, ValueError):
    """A flag, a recipe or a combination of them cannot work. The message names the values and the remedy."""
