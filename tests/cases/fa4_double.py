"""The compiled kernels of flash-attn-4 for sm_90 as functions on a CPU: what each expects, and what it writes.

They hold the arguments to what was compiled for (presence, dtype, shape, strides, alignment), then compute as the
kernels do: per sequence or segment, in place, nothing outside of a segment written, whole tiles read, so that a NaN
behind the last segment spreads, sums kept in padded float32 buffers between the launches. With them the engine's host
code runs through the cases without a GPU and without the package.

B batch, S sequence, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses

import torch

from layerplan.integration.engines.contract import Engine
from layerplan.integration.engines.manifest import BY_ID, MANIFEST, Entry
from layerplan.kernels.attention import fa4, fa4_code
from tests.cases.quack_double import _Hosted, _HostedEntry

LOG2_E = 1.4426950408889634
AUX = ("no score modification",)


def _operand(name: str, x: torch.Tensor, dtype: str, rank: int) -> None:
    assert str(x.dtype) == f"torch.{dtype}" and x.dim() == rank, f"{name}: {x.dtype} {list(x.shape)}"
    assert x.stride(-1) == 1 and not x.data_ptr() & 15, (
        f"{name}: strides {x.stride()}, address {x.data_ptr() & 15} behind 16 bytes"
    )
    assert all(s and s % 8 == 0 for s in x.stride()[:-1]), (
        f"{name}: strides {x.stride()} are no multiples of 16 bytes, or constants"
    )


def _float32(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert x.dtype == torch.float32 and tuple(x.shape) == shape and x.stride(-1) == 1, (
        f"{name}: {x.dtype} {list(x.shape)}, not {shape}"
    )


def _up(n: int, m: int) -> int:
    return -(-n // m) * m


class _Shapes:
    """Where the sequences of a call lie: ``rows`` gives (batch index or None, first row, rows, first padded row)."""

    def __init__(self, code: fa4_code.Code, x: torch.Tensor, cu: torch.Tensor | None) -> None:
        assert (cu is not None) == code.packed and (cu is None or (cu.dtype == torch.int32 and cu.is_contiguous()))
        self.x, self.ends = x, None if cu is None else cu.tolist()

    def rows(self, tile: int):
        if self.ends is None:
            return [(b, 0, self.x.shape[1], 0) for b in range(self.x.shape[0])]
        return [
            (None, a, b - a, (a + i * tile) // tile * tile)
            for i, (a, b) in enumerate(zip(self.ends, self.ends[1:], strict=False))
        ]


def _tile(x: torch.Tensor, where: tuple, tile: int) -> torch.Tensor:
    """[h, rows rounded up to tiles, d] in float32: what a kernel loads, zeros behind the tensor's own end."""
    b, first, n, _ = where
    whole = x if b is None else x[b]
    part = whole[first : first + _up(n, tile)].float().transpose(0, 1)
    return torch.nn.functional.pad(part, (0, 0, 0, _up(n, tile) - part.shape[1]))


def _scores(code: fa4_code.Code, q: torch.Tensor, k: torch.Tensor, sq: int, sk: int, scale: float, window) -> torch.Tensor:
    """[h, padded sq, padded sk] in base e, hidden pairs -inf; rows behind sq are left as they come out."""
    s = (q @ k.repeat_interleave(code.group, 0).transpose(-1, -2)) * scale
    row = torch.arange(q.shape[1])[:, None] + sk - sq
    col = torch.arange(k.shape[1])[None]
    left, right = (None, 0) if code.causal else window
    hidden = col >= sk
    if right is not None:
        hidden = hidden | (col > row + right)
    if left is not None:
        hidden = hidden | (col < row - left)
    return s.masked_fill(hidden, float("-inf"))


def _window(code: fa4_code.Code, left: int | None, right: int | None):
    assert (left is not None, right is not None) == (code.left, code.right) and not (
        code.causal and (code.left or code.right)
    )
    return left, right


def forward(code: fa4_code.Code):
    def kernel(
        q, k, v, out, lse, scale, cu_q, cu_k, used_q, used_k, pages, left, right, sink, sparse, aux, blocks, splits
    ):
        assert (used_q, used_k, pages, sparse, blocks, splits) == (None,) * 6 and aux is AUX
        window, rank = _window(code, left, right), 3 if code.packed else 4
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            _operand(name, x, code.dtype, rank)
        assert (
            out.shape == (*q.shape[:-1], code.dv)
            and k.shape[:-1] == v.shape[:-1]
            and q.shape[-2] == k.shape[-2] * code.group
        )
        _float32("lse", lse, (q.shape[1], q.shape[0]) if code.packed else (q.shape[0], q.shape[2], q.shape[1]))
        assert (sink is None) == (code.sink is None) and (
            sink is None or (str(sink.dtype) == f"torch.{code.sink}" and not sink.data_ptr() & 3)
        )
        tile = 128
        for at_q, at_k in zip(_Shapes(code, q, cu_q).rows(tile), _Shapes(code, k, cu_k).rows(tile), strict=True):
            sq, sk = at_q[2], at_k[2]
            s = _scores(code, _tile(q, at_q, tile), _tile(k, at_k, tile), sq, sk, scale, window)[:, :sq]
            top = s.amax(-1, keepdim=True) if sk else s.new_full((*s.shape[:-1], 1), float("-inf"))
            top = torch.where(top.isinf(), 0.0, top)
            p = torch.exp(s - top)
            total = p.sum(-1, keepdim=True) + (0.0 if sink is None else torch.exp(sink.float().view(-1, 1, 1) - top))
            o = p.to(v.dtype).float() @ _tile(v, at_k, tile).repeat_interleave(code.group, 0)
            o = o / torch.where(total == 0, 1.0, total)
            b, first = at_q[:2]
            (out if b is None else out[b])[first : first + sq] = o.transpose(0, 1).to(out.dtype)
            (lse if b is None else lse[b])[:, first : first + sq] = (torch.log(total) + top)[..., 0]

    return kernel


def backward(code: fa4_code.Code) -> fa4_code.Backward:
    """Tiles of 64 x 128, accumulators of a multiple of 32, as sm_90 has them for causal masks and a head dim of 128."""
    tile_m, tile_n, multiple = 64, 128, 32
    d, dv = _up(code.d, multiple), _up(code.dv, multiple)
    grouped, rank = code.group > 1, 3 if code.packed else 4

    def row_buffers(q, cu_q):
        lead = () if code.packed else (q.shape[0],)
        rows = (q.shape[0] + cu_q.shape[0] * tile_m - 1) // tile_m * tile_m if code.packed else _up(q.shape[1], tile_m)
        return (*lead, q.shape[-2]), rows

    def pre(out, dout, delta, lse, lse2, dq_sum, cu_q, used_q, dlse, row_max, scale_p, scale, blocks, low):
        assert (used_q, row_max, scale_p, scale, blocks, low) == (None, None, None, 1.0, None, None)
        assert (dlse is not None) == code.dlse
        for name, x in (("out", out), ("dout", dout)):
            _operand(name, x, code.dtype, rank)
        lead, rows = row_buffers(out, cu_q)
        _float32(
            "lse", lse, (out.shape[1], out.shape[0]) if code.packed else (out.shape[0], out.shape[2], out.shape[1])
        )
        _float32("delta", delta, (*lead, rows))
        _float32("lse2", lse2, (*lead, rows))
        _float32("dq_sum", dq_sum, (*lead, rows * d))
        for b, first, n, padded in _Shapes(code, out, cu_q).rows(tile_m):
            o, do, stat, base2, sums, log = (x if b is None else x[b] for x in (out, dout, delta, lse2, dq_sum, lse))
            part = slice(padded, padded + _up(n, tile_m))
            seen, rows_here = slice(first, first + n), slice(padded, padded + n)
            stat[:, part], base2[:, part] = 0.0, float("inf")
            value = (o[seen].float() * do[seen].float()).sum(-1).transpose(0, 1)
            if dlse is not None:
                assert dlse.dtype == torch.float32 and dlse.shape == lse.shape
                value = value - (dlse if b is None else dlse[b])[:, seen]
            stat[:, rows_here] = value
            base2[:, rows_here] = torch.where(log[:, seen] == float("-inf"), 0.0, log[:, seen] * LOG2_E)
            sums[:, padded * d : (padded + _up(n, tile_m)) * d] = 0.0

    def main(q, k, v, dout, lse2, delta, dq_sum, dk, dv_out, scale, cu_q, cu_k, used_q, used_k, left, right, *rest):
        *turns, aux, sparse, blocks = rest
        assert (used_q, used_k, sparse, blocks) == (None,) * 4 and aux is AUX and len(turns) == 3
        window = _window(code, left, right)
        for name, x in (
            ("q", q),
            ("k", k),
            ("v", v),
            ("dout", dout),
            *(() if grouped else (("dk", dk), ("dv", dv_out))),
        ):
            _operand(name, x, code.dtype, rank)
        lead_k = () if code.packed else (k.shape[0],)
        rows_k = (
            (k.shape[0] + cu_k.shape[0] * tile_n - 1) // tile_n * tile_n if code.packed else _up(k.shape[1], tile_n)
        )
        if grouped:
            _float32("dk_sum", dk, (*lead_k, k.shape[-2], rows_k * d))
            _float32("dv_sum", dv_out, (*lead_k, k.shape[-2], rows_k * dv))
            assert not dk.any() and not dv_out.any(), "sums must start from 0"
        spans = list(zip(_Shapes(code, q, cu_q).rows(tile_m), _Shapes(code, k, cu_k).rows(tile_n), strict=True))
        longest = max((a[2] for a, _ in spans), default=0), max((b[2] for _, b in spans), default=0)
        for turn, present, h, tiles in ((turns[0], code.deterministic, q.shape[-2], -(-longest[0] // tile_m)),
                                        (turns[1], code.deterministic and grouped, k.shape[-2], -(-longest[1] // tile_n)),
                                        (turns[2], code.deterministic and grouped, k.shape[-2], -(-longest[1] // tile_n))):  # fmt: skip
            assert (turn is not None) == present
            if present:
                assert (
                    turn.dtype == torch.int32
                    and not turn.any()
                    and turn.shape[:2] == (len(spans), h)
                    and turn.shape[2] >= tiles
                )
                assert turn.shape[3] == (1 if turn is turns[0] else 2)
        for at_q, at_k in spans:
            (b, _, sq, padded), (_, first, sk, padded_k) = at_q, at_k
            tq, tk, tv, tdo = (
                _tile(x, at, t)
                for x, at, t in ((q, at_q, tile_m), (k, at_k, tile_n), (v, at_k, tile_n), (dout, at_q, tile_m))
            )
            base2, stat, sums = (x if b is None else x[b] for x in (lse2, delta, dq_sum))
            part = slice(padded, padded + _up(sq, tile_m))
            p = torch.exp(_scores(code, tq, tk, sq, sk, scale, window) - base2[:, part, None] / LOG2_E)
            wide_v, wide_k = tv.repeat_interleave(code.group, 0), tk.repeat_interleave(code.group, 0)
            ds = p * (tdo @ wide_v.transpose(-1, -2) - stat[:, part, None])
            p, ds = p.to(q.dtype).float(), ds.to(q.dtype).float()
            gv, gk = (x.transpose(-1, -2) @ y for x, y in ((p, tdo), (ds, tq)))
            gq = sums[:, padded * d : (padded + _up(sq, tile_m)) * d].view(q.shape[-2], -1, d)
            gq[..., : code.d] += ds @ wide_k
            for total, g, size, own, factor in ((dk, gk, d, code.d, scale), (dv_out, gv, dv, code.dv, 1.0)):
                into = total if b is None else total[b]
                if grouped:
                    here = into[:, padded_k * size : (padded_k + _up(sk, tile_n)) * size].view(k.shape[-2], -1, size)
                    here[..., :own] += g.unflatten(0, (-1, code.group)).sum(1)
                else:
                    into[first : first + sk] = (g[:, :sk] * factor).transpose(0, 1).to(into.dtype)

    def convert(tile: int, size: int, own: int, factor: float | None, takes_sink: bool):
        def kernel(sums, grad, scale, cu, used, sinks, blocks):
            assert used is None and blocks is None and (factor is None or scale == factor)
            assert (sinks is not None) == (takes_sink and code.sink is not None)
            _operand("gradient", grad, code.dtype, rank)
            shapes = _Shapes(code, grad, cu)
            for b, first, n, padded in shapes.rows(tile):
                source, into = (x if b is None else x[b] for x in (sums, grad))
                here = source[:, padded * size : (padded + _up(n, tile)) * size].view(grad.shape[-2], -1, size)
                into[first : first + n] = (here[:, :n, :own] * scale).transpose(0, 1).to(into.dtype)
            if sinks is not None:
                delta, lse, sink, dsink = sinks
                total = torch.zeros(sink.shape)
                for b, first, n, padded in shapes.rows(tile):
                    stat, log = (x if b is None else x[b] for x in (delta, lse))
                    total -= (
                        torch.exp(sink.float()[:, None] - log[:, first : first + n]) * stat[:, padded : padded + n]
                    ).sum(-1)
                dsink.copy_(total)

        return kernel

    post = (convert(tile_m, d, code.d, None, True),)
    if grouped:
        post += (convert(tile_n, d, code.d, None, False), convert(tile_n, dv, code.dv, 1.0, False))
    return fa4_code.Backward(pre, main, post, tile_m, tile_n if grouped else 0, 1, multiple)


def install(monkeypatch) -> list[str]:
    """Put the double in the kernels' place and let their engines run on a CPU as on sm_90; returns their ids."""
    from layerplan.integration.planner import cover

    monkeypatch.setattr(fa4_code, "forward_kernel", forward)
    monkeypatch.setattr(fa4_code, "backward_kernels", backward)
    monkeypatch.setattr(fa4_code, "aux", lambda: AUX)
    monkeypatch.setattr(fa4, "_sm90_wrong_gradient", lambda region, d: None)  # faults that the double does not have
    hosted: dict[str, Entry] = {}
    for e in MANIFEST:
        if e.target.startswith(fa4.__name__):
            fields = {f.name: getattr(e, f.name) for f in dataclasses.fields(Entry)}
            engine: Engine = _Hosted(e.load())
            hosted[e.id] = _HostedEntry(**{**fields, "archs": (*e.archs, "cpu"), "needs": ("torch",), "trial": False}, engine=engine)
            monkeypatch.setitem(BY_ID, e.id, hosted[e.id])
    monkeypatch.setattr(cover, "MANIFEST", tuple(hosted.get(e.id, e) for e in MANIFEST))
    return list(hosted)
