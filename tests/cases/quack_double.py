"""The compiled kernels of quack-kernels as functions on a CPU: what each expects of its arguments, and what it writes.

They take what the engines hand to the package, hold it to the layout that was compiled for (presence, dtype, shape,
last stride, row stride and alignment in vector accesses) and then compute as the kernels do, in place. With them the
engines' host code runs through the cases without a GPU and without the package."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import types

import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Engine
from layerplan.integration.engines.manifest import BY_ID, MANIFEST, Entry
from layerplan.kernels.common import quack as common

ITEMSIZE = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


def tensor(name: str, x: torch.Tensor | None, dtype: str | None, shape: tuple[int | None, ...], step: int = 1) -> None:
    """Hold an argument to what was compiled: None stands for an absent tensor, or for a size that may be any."""
    assert (x is None) == (dtype is None), f"{name}: {'absent' if x is None else 'given'}, compiled for {dtype}"
    if x is None:
        return
    assert str(x.dtype) == f"torch.{dtype}", f"{name}: {x.dtype}, compiled for {dtype}"
    assert x.dim() == len(shape) and all(b is None or a == b for a, b in zip(x.shape, shape, strict=True)), (
        f"{name}: {list(x.shape)}, not {shape}"
    )
    assert x.stride(-1) == 1, f"{name}: last stride {x.stride(-1)}"
    assert all(s % step == 0 for s in x.stride()[:-1]), f"{name}: strides {x.stride()} are no multiples of {step}"
    assert x.data_ptr() % (step * ITEMSIZE[dtype]) == 0, f"{name}: not aligned to {step} elements"
    assert x.numel(), f"{name}: a kernel would be launched on an empty grid"


def compile_norm(dtype, out, res, weight, bias, res_out, width, has_rstd, has_mean, layer, per_head, offset=0.0):
    step = math.gcd(width, *(16 // ITEMSIZE[d] for d in (dtype, out, res, weight, bias, res_out) if d))
    assert not per_head and step * ITEMSIZE[dtype] >= 4, "an asynchronous copy moves 4 bytes or more"

    def kernel(x, w, b, residual, y, total, rstd, mean, eps):
        n = x.shape[0]
        for name, t, d, shape in (
            ("x", x, dtype, (n, width)),
            ("weight", w, weight, (width,)),
            ("bias", b, bias, (width,)),
            ("residual", residual, res, (n, width)),
            ("out", y, out, (n, width)),
            ("residual_out", total, res_out, (n, width)),
        ):
            tensor(name, t, d, shape, step)
        tensor("rstd", rstd, "float32" if has_rstd else None, (n,))
        tensor("mean", mean, "float32" if has_mean else None, (n,))
        h = x.float() if residual is None else x.float() + residual.float()
        if total is not None:
            total.copy_(h)
        m = h.mean(-1, keepdim=True) if layer else torch.zeros(n, 1)
        r = torch.rsqrt((h - m).square().mean(-1, keepdim=True) + eps)
        value = (h - m) * r
        value = value if w is None else value * (w.float() + offset)
        y.copy_(value if b is None else value + b.float())
        if rstd is not None:
            rstd.copy_(r[:, 0])
        if mean is not None:
            mean.copy_(m[:, 0])

    return kernel


def compile_norm_bwd(
    width,
    dtype,
    dout,
    dx_dtype,
    weight,
    has_db,
    dres,
    dres_out,
    has_dw,
    per_head,
    T_hint=0,
    is_layernorm=False,
    weight_offset=0.0,
):
    step = math.gcd(width, *(16 // ITEMSIZE[d] for d in (dtype, dout, dx_dtype, dres, dres_out) if d))
    assert not per_head and T_hint == 0 and dres is None and step * ITEMSIZE[dtype] >= 4

    def kernel(x, w, dy, dresidual_out, rstd, mean, dx, dw, dresidual, db, blocks):
        n = x.shape[0]
        for name, t, d, shape in (
            ("x", x, dtype, (n, width)),
            ("weight", w, weight, (width,)),
            ("dout", dy, dout, (n, width)),
            ("dresidual_out", dresidual_out, dres_out, (n, width)),
            ("dx", dx, dx_dtype, (n, width)),
            ("dresidual", dresidual, None, ()),
            ("dw", dw, "float32" if has_dw else None, (blocks, width)),
            ("db", db, "float32" if has_db else None, (blocks, width)),
        ):
            tensor(name, t, d, shape, step)
        tensor("rstd", rstd, "float32", (n,))
        tensor("mean", mean, "float32" if is_layernorm else None, (n,))
        xhat = (x.float() - (mean[:, None] if is_layernorm else 0.0)) * rstd[:, None]
        wdy = dy.float() if w is None else dy.float() * (w.float() + weight_offset)
        value = (
            wdy - (wdy.mean(-1, keepdim=True) if is_layernorm else 0.0) - xhat * (xhat * wdy).mean(-1, keepdim=True)
        ) * rstd[:, None]
        dx.copy_(value if dresidual_out is None else value + dresidual_out.float())
        for part, full in ((dw, dy.float() * xhat), (db, dy.float())):
            if part is not None:  # every block leaves the sum of its rows
                part.zero_().index_add_(0, torch.arange(n) % blocks, full)

    return kernel


def compile_loss(dtype, target_dtype, width, step, keep_lse):
    def kernel(x, target, target_logit, loss, lse, dx, weight, ignore):
        n = x.shape[0]
        tensor("x", x, dtype, (n, width), step)
        tensor("target", target, target_dtype, (n,))
        tensor("loss", loss, "float32", (n,))
        tensor("lse", lse, "float32" if keep_lse else None, (n,))
        assert target_logit is None and dx is None and weight is None and step * ITEMSIZE[dtype] >= 4
        total = torch.logsumexp(x.float(), -1)
        kept = target != ignore
        loss.copy_(
            torch.where(kept, total - x.float().gather(1, torch.where(kept, target, 0).long()[:, None])[:, 0], 0.0)
        )
        if lse is not None:
            lse.copy_(total)

    return kernel


def compile_loss_bwd(dtype, target_dtype, width, step):
    def kernel(x, target, dloss, dx, lse, weight, ignore):
        n = x.shape[0]
        for name, t in (("x", x), ("dx", dx)):
            tensor(name, t, dtype, (n, width), step)
        tensor("target", target, target_dtype, (n,))
        tensor("lse", lse, "float32", (n,))
        assert dloss.shape == (n,) and dloss.dtype == torch.float32 and weight is None
        p = torch.exp(x.float() - lse[:, None])
        kept = (target != ignore)[:, None]
        hit = torch.arange(width) == torch.where(kept[:, 0], target, -1)[:, None]
        dx.copy_(torch.where(kept, (p - hit.float()) * dloss[:, None], 0.0))

    return kernel


class RotaryKernel:
    @staticmethod
    def compile(dtype, table_dtype, offsets, cu_seqlens, turned, interleaved, conjugate):
        step, table_step = math.gcd(16 // ITEMSIZE[dtype], turned), math.gcd(16 // ITEMSIZE[table_dtype], turned // 2)
        assert offsets is None and cu_seqlens is None and turned % 8 == 0

        def kernel(x, cos, sin, offsets, cu_seqlens, out, longest):
            for name, t in (("x", x), ("out", out)):
                tensor(name, t, dtype, (None, longest, None, None), step)
            for name, t in (("cos", cos), ("sin", sin)):
                tensor(name, t, table_dtype, (None, turned // 2), table_step)
            assert offsets is None and cu_seqlens is None and cos.shape[0] >= longest and out.shape == x.shape
            c, s = (t[:longest].float()[None, :, None] for t in (cos, sin))
            s = -s if conjugate else s
            turn = x[..., :turned].float()
            a, b = (turn[..., 0::2], turn[..., 1::2]) if interleaved else turn.chunk(2, -1)
            pair = a * c - b * s, a * s + b * c
            out[..., :turned] = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(
                out.dtype
            )

        return kernel


def compile_product(arch, dtype, out, *, a_major, b_kn, add=False, bias=None, ragged=None, gather=False):
    if gather:
        assert (a_major, b_kn, add, bias, ragged) == ("k", False, False, None, "m")
        return _gathered(dtype, out)
    if ragged is not None:
        assert (a_major, add) == ("k", False) if ragged == "m" else (a_major, b_kn) == ("m", True)
        return _ragged_m(dtype, out, b_kn) if ragged == "m" else _ragged_k(dtype, out, add)

    def product(a, b, d, v=None):
        m, k, n = a.shape[0], a.shape[1], d.shape[1]
        tensor("a", a if a_major == "k" else a.t(), dtype, (m, k) if a_major == "k" else (k, m), 8)
        tensor("b", b, dtype, (k, n) if b_kn else (n, k), 8)
        tensor("d", d, out, (m, n), 16 // ITEMSIZE[out])
        tensor("bias", v, bias, (1, n), 4)
        value = a.float() @ (b.float() if b_kn else b.float().t())
        value = value if v is None else value + v.float()
        d.copy_(d + value if add else value)

    return product


def _groups(ends, experts):
    tensor("ends", ends, "int32", (experts + 1,), 4)
    values = ends.tolist()
    assert values[0] == 0
    return list(enumerate(itertools.pairwise(values)))


def _ragged_m(dtype, out, b_kn):
    """d of the rows of each group; rows behind the last group are left as they are."""

    def product(a, b, d, ends):
        stored = b.transpose(1, 2) if b_kn else b
        tensor("a", a, dtype, (None, b.shape[2]), 8)
        tensor("b", stored, dtype, (None, None, None), 8)
        tensor("d", d, out, (a.shape[0], b.shape[1]), 16 // ITEMSIZE[out])
        for i, (begin, end) in _groups(ends, len(b)):
            d[begin:end].copy_(a[begin:end].float() @ b[i].float().t())

    return product


def _taken(a, index, count, begin, end):
    """Rows begin .. end of a, through the index where there is one; what it holds elsewhere is not looked at."""
    if index is None:
        return a[begin:end]
    tensor("index", index, "int32", (count,), 4)
    return a[index[begin:end].long()]


def _gathered(dtype, out):
    def product(a, b, d, ends, index):
        tensor("a", a, dtype, (None, b.shape[2]), 8)
        tensor("b", b, dtype, (None, None, None), 8)
        tensor("d", d, out, (None, b.shape[1]), 16 // ITEMSIZE[out])
        for i, (begin, end) in _groups(ends, len(b)):
            d[begin:end].copy_(_taken(a, index, len(d), begin, end).float() @ b[i].float().t())

    return product


def _ragged_k(dtype, out, add):
    def product(a, b, d, ends):
        tensor("a", a.t(), dtype, (None, d.shape[1]), 8)
        tensor("b", b.t(), dtype, (a.shape[1], d.shape[2]), 8)
        tensor("d", d, out, (None, None, None), 16 // ITEMSIZE[out])
        for i, (begin, end) in _groups(ends, len(d)):
            value = a[:, begin:end].float() @ b[:, begin:end].float().t()
            d[i].copy_(d[i] + value if add else value)

    return product


def compile_epilogue(epilogue, arch, a, b, tensors, *, b_kn, concat=(), ends=None, index=None, tile_n=None):
    """The epilogues by name: ``swiglu`` and ``gated`` over a weight of two halves, ``dswiglu`` and ``gradient`` over
    tiles of gate and up; ``gated`` and ``gradient`` are of groups of rows."""
    dtype = str(a.dtype).removeprefix("torch.")
    forward = epilogue in ("swiglu", "gated")
    assert (b_kn, concat) == ((False, ("B",)) if forward else (True, ()))
    assert (ends is not None) == (epilogue in ("gated", "gradient"))

    def groups(a, b, given, *places):
        """(product of a group's rows, its rows of each tensor of ``given``)"""
        if ends is None:
            yield (a.reshape(-1, a.shape[-1]).float() @ (b.float() if b_kn else b[0].float().t())), given
            return
        (bounds, at), count = places, len(next(iter(given.values())))
        assert (at is None) == (index is None)
        for i, (begin, end) in _groups(bounds, len(b)):
            found = _taken(a, at, count, begin, end).float() @ (b[i].float() if b_kn else b[i].float().t())
            yield found, {name: t[begin:end] for name, t in given.items()}

    def launch(a, b, *places, **given):
        assert {n: t.dim() for n, t in given.items()} == {n: t.dim() for n, t in tensors.items()}
        width, count = b.shape[-1] if b_kn else b.shape[-2] // 2, next(t for t in given.values() if t.dim() > 1).shape[-2]
        assert a.dim() == 2 or a.shape[0] == 1
        taken = None if index is not None else count
        tensor("a", a.reshape(-1, a.shape[-1]), dtype, (taken, b.shape[-2] if b_kn else b.shape[-1]), 8)
        tensor("b", b, dtype, (None if ends is not None else 1,) * (b.dim() - 2) + (None, None), 8)
        for name, t in given.items():
            if name == "weight":
                tensor(name, t, "float32", (count,), 4)
            elif name == "dots":
                tensor(name, t, "float32", (count, -(-width // tile_n)))
            else:
                tensor(name, t, dtype, (*t.shape[:-2], count, width), 8)
        for product, own in groups(a, b, given, *places):
            weight = own["weight"].unsqueeze(1) if "weight" in own else 1.0
            if forward:
                gate, up = product.chunk(2, -1)
                (y,) = (t for name, t in own.items() if name != "weight")
                y.copy_((torch.nn.functional.silu(gate) * up * weight).view(y.shape))
                continue
            gate, up = (own[n].float().requires_grad_() for n in ("gate", "up"))
            with torch.enable_grad():
                value = torch.nn.functional.silu(gate) * up
            grads = torch.autograd.grad(value, (gate, up), product * weight)
            own["dgate"].copy_(grads[0])
            own["dup"].copy_(grads[1])
            if "dots" in own:  # each tile of columns leaves the sum over its own
                parts = (value.detach() * product).split(tile_n, 1)
                own["dots"].copy_(torch.stack([p.sum(1) for p in parts], 1))

    return launch


class _Hosted(Engine):
    """An engine of sm_90 asked and built as if for it, while the plan is for a CPU."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.id, self.fuses, self.patterns = inner.id, inner.fuses, inner.patterns

    def match(self, region, arch):
        return self.inner.match(region, ARCHS["sm_90"])

    def offer_with(self, region, arch, knobs):
        return self.inner.offer_with(region, ARCHS["sm_90"], knobs)

    def build(self, ctx: BuildContext):
        return self.inner.build(dataclasses.replace(ctx, arch=ARCHS["sm_90"]))


@dataclasses.dataclass(frozen=True, slots=True)
class _HostedEntry(Entry):
    engine: Engine | None = None

    def load(self):
        return self.engine


def install(monkeypatch) -> list[str]:
    """Put the double in the package's place and let its engines run on a CPU; returns their ids."""
    from layerplan.integration.planner import cover
    from layerplan.kernels.linear import quack as linear
    from layerplan.kernels.linear import quack_experts as linear_experts
    from layerplan.kernels.linear import quack_grouped as linear_grouped
    from layerplan.kernels.linear import quack_swiglu as linear_swiglu
    from layerplan.kernels.loss import quack as loss
    from layerplan.kernels.norm import quack as norm
    from layerplan.kernels.rope import quack as rope

    modules = {
        "quack": {},
        "quack.rmsnorm": {"_compile_rmsnorm_fwd": compile_norm, "_compile_rmsnorm_bwd": compile_norm_bwd},
        "quack.rotary": {"RotaryKernel": RotaryKernel},
        "quack.epilogue": {},
        "quack.epilogue.library": {"linear_act_mod": lambda name, **flags: name},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for module in (common, norm, loss, rope):
        monkeypatch.setattr(module, "cute_dtype", lambda name: name)
    for module in (linear, linear_grouped, linear_experts):
        monkeypatch.setattr(module, "compile_product", compile_product)
    for module in (linear_swiglu, linear_experts):
        monkeypatch.setattr(module, "compile_epilogue", compile_epilogue)
    monkeypatch.setattr(linear_experts, "_gated", lambda weighted: "gated")
    monkeypatch.setattr(linear_experts, "_gradient", lambda weighted, dots: "gradient")
    monkeypatch.setattr(linear_swiglu, "_backward_epilogue", lambda: "dswiglu")
    monkeypatch.setattr(loss, "_compilers", lambda: (compile_loss, compile_loss_bwd))
    hosted = {}
    for e in MANIFEST:
        if "quack" in e.needs:
            fields = {f.name: getattr(e, f.name) for f in dataclasses.fields(Entry)}
            hosted[e.id] = _HostedEntry(
                **{**fields, "archs": (*e.archs, "cpu"), "needs": ("torch",), "trial": False}, engine=_Hosted(e.load())
            )
            monkeypatch.setitem(BY_ID, e.id, hosted[e.id])
    monkeypatch.setattr(cover, "MANIFEST", tuple(hosted.get(e.id, e) for e in MANIFEST))
    return list(hosted)
