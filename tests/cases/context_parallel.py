"""Context parallelism on packed sequences, simulated in one process: who holds which token, and attention over chunks.

Each sequence is padded to a multiple of 2 cp and cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r, so that
causal work is even. A rank attends its query chunks to every key chunk at or before theirs and merges the parts by LSE.
Padding is hidden by ``cu_seqlens``: each call gets the real rows first, and rows behind the last end belong to no segment.
"""

from __future__ import annotations

import itertools

import torch

from layerplan.integration import ops

from .. import oracle
from .catalogue import plain_attention

REAL, PADDED = (5, 8, 3, 12, 8, 7), (8, 8, 4, 12, 8, 8)


def chunks_of_rank(cp: int, rank: int) -> tuple[int, int]:
    """The two of 2 cp chunks of each sequence that a rank holds, in the order in which it holds them."""
    return rank, 2 * cp - 1 - rank


def rows_of_rank(cu: list[int], cp: int, rank: int, restart: bool = False) -> list[int]:
    """Rows of a packed, padded tensor that a rank holds. ``restart``: positions inside of each sequence, otherwise of the pack."""
    rows = []
    for begin, end in itertools.pairwise(cu):
        chunk = (end - begin) // (2 * cp)
        for c in chunks_of_rank(cp, rank):
            rows += range((0 if restart else begin) + c * chunk, (0 if restart else begin) + (c + 1) * chunk)
    return rows


def real_in_chunk(real: int, padded: int, cp: int, chunk: int) -> int:
    """Real tokens in one chunk of a sequence of ``real`` tokens that is padded at its end."""
    size = padded // (2 * cp)
    return min(max(real - chunk * size, 0), size)


def real_tokens_of_rank(real: tuple[int, ...], padded: tuple[int, ...], cp: int, rank: int) -> int:
    """How many tokens of a rank count, in a mean loss for example."""
    return sum(real_in_chunk(r, p, cp, c) for r, p in zip(real, padded, strict=True) for c in chunks_of_rank(cp, rank))


def _chunk_rows(cp: int, chunk: int) -> tuple[list[int], list[int], list[int]]:
    """(real rows of one chunk of every sequence, its padding rows, cumulative real lengths) in the padded pack."""
    starts = [0, *itertools.accumulate(PADDED)]
    rows, padding, cu = [], [], [0]
    for begin, real, padded in zip(starts, REAL, PADDED, strict=False):
        size, n = padded // (2 * cp), real_in_chunk(real, padded, cp, chunk)
        first = begin + chunk * size
        rows += range(first, first + n)
        padding += range(first + n, first + size)
        cu.append(cu[-1] + n)
    return rows, padding, cu


def _attend(q, k, v, cp: int, attention) -> torch.Tensor:
    """Output of the whole padded pack, every chunk of queries on its own; padding rows stay 0.

    ``attention(q, k, v, cu_q, cu_k, causal) -> (out, lse)``, packed.
    """
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for rank in range(cp):
        for mine in chunks_of_rank(cp, rank):
            rows, padding, cu_q = _chunk_rows(cp, mine)
            q_rows = torch.tensor(rows + padding, device=q.device)
            parts, lses = [], []
            for theirs in range(mine + 1):  # later chunks lie in the future of every query here
                k_real, k_padding, cu_k = _chunk_rows(cp, theirs)
                k_rows = torch.tensor(k_real + k_padding, device=q.device)
                cu = [torch.tensor(c, dtype=torch.int32, device=q.device) for c in (cu_q, cu_k)]
                part, lse = attention(q[q_rows], k[k_rows], v[k_rows], *cu, theirs == mine)
                parts.append(part[: len(rows)])
                lses.append(lse[:, : len(rows)])
            lse = torch.stack(lses)
            weight = torch.exp(lse - torch.logsumexp(lse, 0)).transpose(-1, -2).unsqueeze(-1)  # [part, t, h, 1]
            merged = (weight * torch.stack(parts)).sum(0).to(q.dtype)
            out = out.index_copy(0, q_rows[: len(rows)], merged)
    return out


def case_04_context_parallel_equals_one_rank(device, engine, cp=2, d=64):
    """Real lengths 5, 8, 3, 12, 8, 7 padded to 8, 8, 4, 12, 8, 8; NaN in all padding: out, dq, dk, dv are those of one rank
    without padding, padding gets gradient 0, a second run is bitwise equal."""
    gen = torch.Generator().manual_seed(4)
    real = torch.tensor([b + i for b, n in zip([0, *itertools.accumulate(PADDED)], REAL, strict=False) for i in range(n)], device=device)
    tight = torch.tensor([0, *itertools.accumulate(REAL)], dtype=torch.int32, device=device)
    nan = float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        short = [torch.randn(sum(REAL), h, d, generator=gen).to(device, dtype) for h in (4, 2, 2)]
        dshort = torch.randn(sum(REAL), 4, d, generator=gen).to(device, dtype)
        leaves = [torch.full((sum(PADDED), *x.shape[1:]), nan, dtype=dtype, device=device).index_copy(0, real, x).requires_grad_() for x in short]
        dout = torch.full((sum(PADDED), 4, d), nan, dtype=dtype, device=device).index_copy(0, real, dshort)

        def ours(q, k, v, cu_q, cu_k, causal):
            oracle.poison(q, k, v)
            return ops.attention(q, k, v, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, engine=engine)

        out = _attend(*leaves, cp, ours)
        oracle.equal(_attend(*leaves, cp, ours).detach(), out.detach(), "second run")
        grads = torch.autograd.grad(out, leaves, dout)
        results = []
        for kind in (torch.float64, dtype):
            t = [x.to(kind).requires_grad_() for x in short]
            o = plain_attention({"q": t[0], "k": t[1], "v": t[2], "cu_seqlens_q": tight, "cu_seqlens_k": tight}, causal=True)[0]
            results.append((o, *torch.autograd.grad(o, t, dshort.to(kind))))
        padding = torch.ones(sum(PADDED), dtype=torch.bool, device=device).index_fill(0, real, False)
        for name, mine, truth, peer in zip(("out", "dq", "dk", "dv"), (out, *grads), *results, strict=True):
            oracle.compare(mine[real], truth, peer, f"{dtype} {name}, cp = {cp}")
            assert not mine[padding].any(), f"{name}: padding must be 0"
