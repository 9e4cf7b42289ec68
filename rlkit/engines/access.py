"""The secret of a run, without which its engines and its router refuse every call but `/health`.

It travels in the environment, which only the run's own user can read: never on a command line, in the configuration or
in a log. Engines that run already bring their own: set the variable to their API key before the start.
"""

import os
import secrets
import sys
from collections.abc import Mapping

TOKEN_VARIABLE = "RLKIT_ENGINE_TOKEN"

# Hands the token to a server that takes it as `--api-key` only, inside its own process. Runs in the Python of SGLang,
# so it must not need rlkit.
_WITH_KEY = (
    "import os, runpy, sys; module = sys.argv[1]; "
    f"sys.argv = [module, *sys.argv[2:], '--api-key=' + os.environ['{TOKEN_VARIABLE}']]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=False)"
)


def make_token() -> None:
    """Give this process, and what it starts, a secret, unless there is one."""
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(24))


def use_token(token: str | None) -> None:
    """In a Ray worker: take over the driver's secret. It comes as an argument, because Ray writes the variables of a
    worker's environment into a log that everybody can read.
    """
    if token is None:
        forget_token()
    else:
        os.environ[TOKEN_VARIABLE] = token


def forget_token() -> None:
    """Calls are made, and servers started, without a secret."""
    os.environ.pop(TOKEN_VARIABLE, None)


def current_token() -> str | None:
    """The run's secret; None where it has none."""
    return os.environ.get(TOKEN_VARIABLE) or None


def call_headers() -> dict[str, str]:
    """What every request to engines and router carries."""
    token = current_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def module_command(module: str, *, python: str = sys.executable) -> list[str]:
    """`python -m module`, or the same with `--api-key` where the run has a secret; arguments come behind it."""
    return [python, "-m", module] if current_token() is None else [python, "-c", _WITH_KEY, module]


def is_allowed(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a server with the run's secret answers a request. As SGLang: health needs none."""
    token = current_token()
    if token is None or path.startswith("/health") or path == "/ping":
        return True
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and secrets.compare_digest(given.encode(), token.encode())
