"""Secrets stay out of files: values whose name says that they are one, and parts of addresses that let somebody in.

Used where a configuration is written or shown, and by the logs. What runs keeps the real values.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)($|_)", re.IGNORECASE)
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/@]+)@", re.IGNORECASE)
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
MIN_LENGTH = 8
"""Shorter values of such variables are no secrets, and would be found in every other word."""


def holds_secret(name: str) -> bool:
    """Whether a variable or option of that name holds a secret: `WANDB_API_KEY`, `HF_TOKEN`, `ssl_keyfile_password`."""
    return _SECRET_NAME.search(name) is not None


def redacted(value: Any) -> Any:
    """A copy with secrets hidden."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: HIDDEN if _is_hidden(str(key), item) else redacted(item) for key, item in items}
    if isinstance(value, list):
        return [redacted(item) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(redacted(item) for item in cast("tuple[Any, ...]", value))
    return without_credentials(value) if isinstance(value, str) else value


def redacted_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """A `to_json` document to be written or shown. Flags themselves are no secrets (`--input-key`); what a user puts
    into them, such as variables of `--train-env-vars` or the address of `--rm-url`, may be.
    """
    return {
        section: {
            name: {**entry, "value": redacted(entry["value"])} if "value" in entry else redacted_entries(entry)
            for name, entry in entries.items()
        }
        for section, entries in document.items()
    }


def redacted_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The same for what is passed through: name -> entry."""
    return {
        name: {**entry, "value": HIDDEN if _is_hidden(name, entry["value"]) else redacted(entry["value"])}
        for name, entry in entries.items()
    }


def without_credentials(text: str) -> str:
    """Addresses in `text` without user, password and keys: `https://user:pass@host` -> `https://***@host`."""
    return _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}@", text))


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` without credentials in addresses, and without the values of secret variables of the environment."""
    for name, value in environment.items():
        if len(value) >= MIN_LENGTH and value in text and holds_secret(name):
            text = text.replace(value, HIDDEN)
    return without_credentials(text)


def _is_hidden(name: str, value: Any) -> bool:
    return holds_secret(name) and isinstance(value, str) and value != ""
