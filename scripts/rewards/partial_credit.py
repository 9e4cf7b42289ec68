"""Rewards for a model that is rarely right: the last number of a response, compared with the label, with credit for
being close.

Used by the SmolLM2 recipes through `--custom-rm-path scripts/rewards/partial_credit.py:score`.
"""

import math
import re
from typing import Any

NUMBER = re.compile(r"-?(?:[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?")
FOR_A_NUMBER = 0.1
"""For any number at all."""
FOR_CLOSENESS = 0.3
"""At most, for a number near the right one."""


def score(response: str, label: Any, metadata: dict[str, Any]) -> dict[str, float]:
    """`score` in [0, 1]: 1 for the right last number, else up to 0.4 for a near one, 0 without any. `correct` is 0 or
    1.

    Closeness halves for every factor of two between the two magnitudes; a number of the other sign gets none.
    """
    wanted = last_number(str(label))
    found = last_number(response)
    if wanted is None:
        raise ValueError(f"the label {label!r} holds no number")
    if found is None:
        return {"score": 0.0, "correct": 0.0}
    if math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9):
        return {"score": 1.0, "correct": 1.0}
    is_comparable = found * wanted > 0
    closeness = 2.0 ** -abs(math.log2(found / wanted)) if is_comparable else 0.0
    return {"score": FOR_A_NUMBER + FOR_CLOSENESS * closeness, "correct": 0.0}


def last_number(text: str) -> float | None:
    """The last decimal number of a text; commas between groups of three digits are left out, all others
    separate numbers."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
