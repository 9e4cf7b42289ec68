"""Says aloud when a grader never finds the marker it needs. Owned by whoever grades: `grade` for the process, each
`GraderPool` for itself.

Without it a model that does not close its thinking, or never writes a box, scores 0 on everything in silence.
"""

import logging
import threading
from collections import Counter

logger = logging.getLogger(__name__)

FIRST_WARNING_AFTER = 8
"""Responses in a row without the marker before the first warning; the next ones come at eight times as many."""

_REPEAT_FACTOR = 8


class MarkerWatch:
    """Counts responses in a row that lacked the marker of their grader. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missing: Counter[tuple[str, str]] = Counter()
        self._warn_at: dict[tuple[str, str], int] = {}

    def note(self, rm_type: str, marker: str, *, found: bool) -> None:
        """Record one response; warn when many in a row, whatever their labels, had no `marker`."""
        key = (rm_type, marker)
        with self._lock:
            if found:
                self._missing[key] = 0
                self._warn_at.pop(key, None)
                return
            self._missing[key] += 1
            count, threshold = self._missing[key], self._warn_at.get(key, FIRST_WARNING_AFTER)
            if count < threshold:
                return
            self._warn_at[key] = threshold * _REPEAT_FACTOR
        logger.warning(
            "rm_type %s: none of the last %d responses contains %s, so each scored 0. Does the prompt ask for it, "
            "is the response long enough to reach it, or does another --rm-type fit this model?",
            rm_type,
            count,
            marker,
        )
