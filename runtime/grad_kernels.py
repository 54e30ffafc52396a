"""Gradients that are computed straight into ``main_grad``: what the ops ``megabuf::accumulate_*`` do."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_wgrad(
    main_grad: Tensor, lhs: Tensor, rhs: Tensor, accumulate: bool, *, beta: float = 1.0, alpha: float = 1.0
) -> None:
    """``main_grad = alpha * (lhs @ rhs) (+ beta * main_grad)``, written straight into the buffer.

    Shapes: ``main_grad`` ``[m, n]``, ``lhs`` ``[m, k]``, ``rhs`` ``[k, n]``; ``main_grad`` may be wider than the
    factors. Without a kernel of mixed dtypes (CPU) the product is rounded to the factors' dtype and then added. What
    ``main_grad`` held may be NaN when it is not accumulated.
    """
    check_product(main_grad, lhs, rhs)
    # `.data` shares the storage and not the version counter, see [Note: order of collectives in a graph].
    destination = main_grad.data
    kept = beta if accumulate else 0.0
    if destination.dtype == lhs.dtype:
        destination.addmm_(lhs, rhs, beta=kept, alpha=alpha)
    elif destination.is_cuda and destination.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(
            destination, lhs, rhs, destination.dtype, beta=kept, alpha=alpha, out=destination
        )
    elif accumulate:
        if beta != 1:
            destination.mul_(beta)
        destination.add_(torch.mm(lhs, rhs), alpha=alpha)
    else:
        destination.copy_(torch.mm(lhs, rhs))
        if alpha != 1:
            destination.mul_(alpha)


def check_product(main_grad: Tensor, lhs: Tensor, rhs: Tensor, *unused: object, **factors: float) -> None:
    """Raise RuntimeError when the shapes do not fit."""
    # An `out=` of another shape would be resized, over the gradients of its neighbours in the buffer.
    if lhs.dim() != 2 or rhs.dim() != 2 or tuple(main_grad.shape) != (lhs.shape[0], rhs.shape[1]):
        raise RuntimeError(
            f"megabuf::accumulate_wgrad_ of {tuple(lhs.shape)} @ {tuple(rhs.shape)} into {tuple(main_grad.shape)}"
        )


def accumulate_embedding(
    main_grad: Tensor,
    grad: Tensor,
    indices: Tensor,
    padding_idx: int,
    accumulate: bool,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> None:
    """``main_grad[indices] += alpha * grad``, row by row, onto ``beta`` times what is there or, without ``accumulate``,
    onto zeros.

    Shapes: ``main_grad`` ``[n, ...]``, ``indices`` any shape of int32 or int64, ``grad`` ``[*indices.shape, ...]``.
    Rows of index ``padding_idx``, of negative indices and of those from ``n`` on are left out, as in
    ``aten.embedding_dense_backward``. Allocates as much as ``grad`` at most, nothing of the size of ``main_grad``. The
    order of a sum does not depend on timing; a 16-bit ``main_grad`` gets the fp32 sum of its rows, rounded once.
    """
    check_rows(main_grad, grad, indices)
    # `.data`: see above.
    table = main_grad.data
    if not accumulate:
        table.zero_()
    elif beta != 1:
        table.mul_(beta)
    if not indices.numel() or not table.numel():
        return
    rows = grad.reshape(indices.numel(), *table.shape[1:])
    places, rows = _leave_out(indices.reshape(-1).long(), rows, len(table), padding_idx)
    if table.dtype.itemsize < 4:
        places, rows = _sum_equal(places, rows.float(), len(table))
    rows = rows.to(torch.promote_types(rows.dtype, table.dtype))
    _add_rows(table, places, (rows if alpha == 1 else rows * alpha).to(table.dtype))


def _leave_out(places: Tensor, rows: Tensor, count: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Without the rows whose place is ``padding_idx`` or not in ``range(count)``."""
    is_kept = (places >= 0) & (places < count) & (places != padding_idx)
    if places.is_cpu:
        # The host may read here, and most often finds that it need not copy.
        if is_kept.all():
            return places, rows
        kept = is_kept.nonzero().squeeze(1)
        return places[kept], rows.index_select(0, kept)
    # Zeros, spread over the table: a GPU adds rows of one place one after the other.
    anywhere = torch.arange(len(places), device=places.device) % count
    return places.where(is_kept, anywhere), rows.where(is_kept.view(-1, *[1] * (rows.dim() - 1)), 0)


def _sum_equal(places: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of one of ``count`` places added up, and their places; what the sums do not fill is zero."""
    if count <= len(places):
        sums = rows.new_zeros(count, *rows.shape[1:])
        _add_rows(sums, places, rows)
        return torch.arange(count, device=places.device), sums
    order = places.argsort(stable=True)
    places = places[order]
    is_next = places.new_zeros(len(places))
    is_next[1:] = places[1:] != places[:-1]
    sum_of = is_next.cumsum(0)
    sums = torch.zeros_like(rows)
    _add_rows(sums, sum_of, rows[order])
    return torch.zeros_like(places).scatter_(0, sum_of, places), sums


def _add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    # `index_add_` adds in order on a CPU, and with atomics on a GPU, where `index_put_` sorts.
    if table.is_cpu:
        table.index_add_(0, places, rows)
    else:
        table.index_put_((places,), rows, accumulate=True)


def check_rows(main_grad: Tensor, grad: Tensor, indices: Tensor, *unused: object, **factors: float) -> None:
    """Raise RuntimeError when the shapes do not fit or indices are no integers."""
    if main_grad.dim() == 0 or grad.shape != (*indices.shape, *main_grad.shape[1:]):
        raise RuntimeError(
            f"megabuf::accumulate_embedding_ of rows {tuple(grad.shape)} at indices {tuple(indices.shape)} into "
            f"{tuple(main_grad.shape)}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"megabuf::accumulate_embedding_ with indices of {indices.dtype}, expected int32 or int64")
