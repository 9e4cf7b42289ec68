"""Log-probs of prompt tokens: which logits a prefill pass has to keep for them, and what they give.

Used by `engine.py`.
"""

import torch
from torch import Tensor

from rlkit.engines.embedded.model import PromptPiece
from rlkit.engines.embedded.scheduler import PlannedPiece

ROWS_AT_A_TIME = 256
"""Rows of logits that are held in float32 at a time."""


def prompt_piece(piece: PlannedPiece) -> PromptPiece:
    """The tokens of a piece, with logits for the next token after its last and for log-probs of the prompt."""
    request = piece.request
    rows = set[int]()
    if request.wants_input_logprobs:
        # The token at position p is scored by the logits at p - 1.
        rows.update(range(max(request.logprob_start - 1, piece.start, 0), min(piece.stop, len(request.prompt) - 1)))
    if piece.is_last:
        rows.add(piece.stop - 1)
    return PromptPiece(
        slot=request.slot,
        tokens=request.tokens()[piece.start : piece.stop],
        start=piece.start,
        logit_rows=[position - piece.start for position in sorted(rows)],
    )


def add_input_logprobs(piece: PlannedPiece, logits_RV: Tensor) -> None:
    """Score prompt tokens, without temperature as in SGLang. `logits_RV` are the piece's wanted rows, in order."""
    request = piece.request
    if request.logprob_start == 0 and piece.start == 0:
        request.input_logprobs.append(None)
    first = max(request.logprob_start - 1, piece.start, 0)
    targets = request.prompt[first + 1 : piece.stop + 1]
    if not targets:
        return
    targets_R = torch.tensor(targets, device=logits_RV.device)
    for rows, tokens in zip(
        logits_RV[: len(targets)].split(ROWS_AT_A_TIME), targets_R.split(ROWS_AT_A_TIME), strict=True
    ):
        logprobs = rows.float().log_softmax(-1).gather(1, tokens[:, None])
        request.input_logprobs.extend(logprobs[:, 0].tolist())
