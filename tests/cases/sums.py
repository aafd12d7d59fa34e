"""How far PyTorch's float32 sums of a few vectors may be off, whatever the order of their terms."""

from __future__ import annotations

import functools

import torch

FEW, _ORDERS = 32, 64


def worst_order(terms: torch.Tensor, exact: torch.Tensor, peer: torch.Tensor, count: int = 1) -> torch.Tensor:
    """For each of a few sums PyTorch's float32 result with the largest error: ``peer``, or the ``terms`` [n, *sums]
    added one after another in one of 64 orders and divided by ``count``; ``exact`` and ``peer`` have the shape [*sums].

    Terms have no order of their own, and the error of their sum depends on it: it is a draw, and so is PyTorch's. Twice
    the root mean square of n draws is passed by that of n others with the probability of F(n, n) > 4: 0.3 for one, 1e-4
    for 32 (``FEW``). Below, one draw of PyTorch's does not say how large its errors are. Twice the largest of 64 is
    passed by one more with a probability of 2e-5 where the draws have one spread; no order spreads further than one
    term after another, where every partial sum is of all terms before."""
    if not peer.numel() or not len(terms):
        return peer
    terms, generator = terms.float().cpu().reshape(len(terms), -1), torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(len(terms), generator=generator) for _ in range(_ORDERS)], 1)
    sums = functools.reduce(torch.add, (terms[rows] for rows in orders), torch.zeros(_ORDERS, terms.shape[1])) / count
    made = torch.cat((sums.to(peer.dtype), peer.cpu().reshape(1, -1)))
    worst = (made.double() - exact.cpu().double().reshape(1, -1)).abs().argmax(0)
    return made.gather(0, worst[None])[0].reshape(peer.shape).to(peer.device)
