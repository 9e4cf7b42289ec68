"""Reads the end of a dead engine's log: which flag would have helped. Called by whoever reports the death."""

import re

_TRIED = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<wanted>[\d.]+ \w+)\."
    r"(?:.*?total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free)?",
    re.DOTALL,
)
_NO_POOL = re.compile(r"(?:Not enough memory|mem[-_]fraction[-_]static)[^\n]*", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"Address already in use|address already in use")
_TRACEBACK = "Traceback (most recent call last)"
LINES_SHOWN = 20


def telling_part(log_end: str) -> str:
    """The last lines, preceded by the error that the last traceback ends in where that is further up."""
    lines = log_end.splitlines()
    shown = lines[-LINES_SHOWN:]
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not begins or begins[-1] >= len(lines) - LINES_SHOWN:
        return "\n".join(shown)
    indented = (number for number in range(begins[-1] + 1, len(lines)) if not lines[number].startswith((" ", "[")))
    error = next(indented, None)
    if error is None or error >= len(lines) - LINES_SHOWN:
        return "\n".join(shown)
    return "\n".join([lines[error], "...", *shown])


def advice_on_death(log_end: str) -> str:
    """One sentence that begins with a line break, or nothing when the log holds no cause that is known."""
    tried = _TRIED.search(log_end)
    if tried is not None:
        numbers = f"it wanted {tried['wanted']}"
        if tried["total"] is not None:
            numbers += f", {tried['free']} of {tried['total']} were free"
        return (
            f"\nThe GPU is full: {numbers}. Lower --sglang-mem-fraction-static (or --sglang-max-total-tokens), "
            "--sglang-cuda-graph-max-bs-decode or --sglang-chunked-prefill-size; see what else runs on that GPU."
        )
    pool = _NO_POOL.search(log_end)
    if pool is not None:
        return (
            f'\nThere is no room for the KV cache ("{pool[0].strip()[:160]}"): raise --sglang-mem-fraction-static, or '
            "use more GPUs per engine (--rollout-num-gpus-per-engine)."
        )
    if _PORT_TAKEN.search(log_end):
        return "\nAnother process took the engine's port between its choice and the start; start the run again."
    return ""
