"""On-policy distillation: the student is paid for what its teacher finds likely. Called by `objective.py`.

Shapes: T packed tokens. Agarwal et al. 2024 (arXiv:2306.13649), as a reward of each token: Lu, "On-Policy Distillation"
(Thinking Machines, 2025).
"""

import torch
from torch import Tensor


def distillation_advantages(student_logp_T: Tensor, teacher_logp_T: Tensor, *, mask_T: Tensor, coef: float) -> Tensor:
    """[T]: minus `coef` times the sampled reverse KL, logp_student - logp_teacher, of each trained token, 0 elsewhere.

    To be added to the advantages. A token answers for its own divergence only (discount 0). No gradient; masked entries
    may hold anything.
    """
    gap_T = student_logp_T.detach() - teacher_logp_T.detach()
    return torch.where(mask_T, -coef * gap_T, gap_T.new_zeros(()))
