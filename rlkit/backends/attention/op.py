"""Packed attention as one opaque operator, so that a compiled block is one graph. Called by `fsdp/attention.py` while
torch.compile traces a block.

The operator takes tensors and constants only. Which sequences a row holds (lengths, buckets, the longest one) is
Python data that changes with every micro-batch: as arguments they would be guarded, and every pack would compile anew.
So the operator gets the layout's `handle`, a CPU tensor with a number in it, and finds the layout by that number when
it runs.

Shapes: T packed tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

NO_WINDOW = -1

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradFunctionality,
)

_numbers = count()
_LAYOUTS: WeakValueDictionary[int, Any] = WeakValueDictionary()


class AttentionKernel:
    """Forward and backward of one implementation, without autograd around it."""

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, Any, float, int | None], tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
        *,
        keeps_lse: bool,
    ) -> None:
        """`forward(q, k, v, layout, scale, window)` -> (out [T, H, D], what backward needs beside it).
        `backward(grad, q, k, v, out, lse, layout, scale, window)` -> gradients of q, k and v.
        With `keeps_lse` the second output of forward is the log-sum-exp of the scores, float32 [H, T]; else it is
        empty.
        """
        self.forward, self.backward, self.keeps_lse = forward, backward, keeps_lse


_KERNELS: dict[str, AttentionKernel] = {}


def register_kernel(name: str, kernel: AttentionKernel) -> None:
    _KERNELS[name] = kernel


def new_handle(layout: Any) -> Tensor:
    """int64 [1] on the CPU, by which the operator finds `layout` as long as somebody holds it."""
    number = next(_numbers)
    _LAYOUTS[number] = layout
    return torch.tensor([number])


def layout_of(handle: Tensor) -> Any:
    """The layout that `new_handle` gave the number to. KeyError when nobody holds it any more."""
    return _LAYOUTS[int(handle)]


def by_autograd(attend: Callable[..., Tensor]) -> AttentionKernel:
    """A kernel from a differentiable function, which runs once more in the backward pass."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, *others), q.new_empty(0, dtype=torch.float32)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with _autograd_inside_an_operator():
            dq, dk, dv = torch.autograd.grad(attend(*inputs, *others), inputs, grad)
        return dq, dk, dv

    return AttentionKernel(forward, backward, keeps_lse=False)


@contextmanager
def _autograd_inside_an_operator() -> Iterator[None]:
    """Autograd as outside: an operator is entered with its dispatch keys excluded, so that grad mode alone records
    nothing.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _found(handle: Tensor, window: int) -> tuple[Any, int | None]:
    """The layout, and the window where it cuts anything off."""
    layout = _LAYOUTS[int(handle)]
    return layout, None if window == NO_WINDOW or window >= layout.max_seqlen else window


@torch.library.custom_op("rlkit::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, kind: str, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(attention output [T, H, D], float32 log-sum-exp [H, T] or nothing [0])."""
    layout, cut = _found(handle, window)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = _KERNELS[kind].forward(q, k, v, layout, scale, cut)
    return out.contiguous(), lse


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, kind: str, scale: float, window: int) -> tuple[Tensor, Tensor]:
    shape = (q.shape[1], q.shape[0]) if _KERNELS[kind].keeps_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("rlkit::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    kind: str,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    layout, cut = _found(handle, window)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    dq, dk, dv = _KERNELS[kind].backward(grad.contiguous(), q, k, v, out, lse, layout, scale, cut)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@packed_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    kind: str,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, handle, ctx.kind, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, handle)


def _pull_back(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, handle = ctx.saved_tensors
    grads = packed_attention_backward(grad_out, q, k, v, out, lse, handle, ctx.kind, ctx.scale, ctx.window)
    return *grads, None, None, None, None


packed_attention.register_autograd(_pull_back, setup_context=_keep)
