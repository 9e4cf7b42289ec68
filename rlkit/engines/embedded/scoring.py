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
        rows.update(_scoring_positions(piece))
    if piece.is_last:
        rows.add(piece.stop - 1)
    return PromptPiece(
        slot=request.slot,
        tokens=request.tokens()[piece.start : piece.stop],
        start=piece.start,
        logit_rows=[position - piece.start for position in sorted(rows)],
    )


def _scoring_positions(piece: PlannedPiece) -> range:
    """Positions of the piece whose logits score a wanted token, which is the next one. As in SGLang, the first wanted
    token has no log-prob."""
    return range(max(piece.request.logprob_start, piece.start), min(piece.stop, len(piece.request.prompt) - 1))


def add_input_logprobs(piece: PlannedPiece, logits_RV: Tensor) -> None:
    """Score prompt tokens, without temperature as in SGLang. `logits_RV` are the piece's wanted rows, in order."""
    request = piece.request
    positions = _scoring_positions(piece)
    targets_R = torch.tensor([request.prompt[position + 1] for position in positions], device=logits_RV.device)
    for rows, tokens in zip(
        logits_RV[: len(positions)].split(ROWS_AT_A_TIME), targets_R.split(ROWS_AT_A_TIME), strict=True
    ):
        if len(tokens):
            logprobs = rows.float().log_softmax(-1).gather(1, tokens[:, None])
            request.input_logprobs.extend(logprobs[:, 0].tolist())
