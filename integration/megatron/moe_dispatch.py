"""How tokens reach the experts of an MoE layer and come back: over all ranks at once, or row by row to the ranks that
need them.

A dispatcher's ``start`` begins with a layer's tokens and returns a function without arguments that ends with the
experts' sums [t, h]; what it needs not wait for may run in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size

from ...modules.graphs import TensorParallel
from ...modules.moe import permute_graph, receive_rows, unpermute_graph

type Finish = Callable[[], torch.Tensor]


class _Dispatcher:
    def __init__(self, groups: Any, num_local_experts: int) -> None:
        self.count, self.first = num_local_experts, get_pg_rank(groups.ep) * num_local_experts

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dispatcher:
        return self  # groups of processes are the process's


class AllGather(_Dispatcher):
    """Every rank sees the tokens of all ranks that share the experts (expert times tensor parallel) and sums what its
    experts make of them; the sums are reduced and scattered. Waits for nothing. With one rank nothing is gathered."""

    def __init__(self, groups: Any, num_local_experts: int) -> None:
        super().__init__(groups, num_local_experts)
        self.group, self.whole = groups.tp_ep, get_pg_size(groups.ep) == 1
        self.gather = TensorParallel(get_pg_size(groups.tp_ep), True, "tp_ep")

    def start(self, layer: Any, x: torch.Tensor, probs: torch.Tensor, expert_map: torch.Tensor) -> Finish:
        """x [t, h], probs [t, k], expert_map [t, k] -> what returns [t, h]."""
        if self.gather.size > 1:
            own = expert_map.contiguous()
            expert_map = own.new_empty((len(own) * self.gather.size, own.shape[1]))
            dist.all_gather_into_tensor(expert_map, own, group=self.group)
        if not self.whole:
            local = expert_map - self.first
            expert_map = torch.where((local >= 0) & (local < self.count), local, -1)
        return lambda: layer.run_experts(self.gather, self.group, x, probs, expert_map)


class AllToAll(_Dispatcher):
    """Rows go to the ranks of their experts and back. The numbers of rows are the one thing that the host must know:
    they are copied while the device works on, and waited for in the second half. Tensor-parallel experts gather the
    rows of their group, in buffers of one size."""

    def __init__(self, groups: Any, num_local_experts: int) -> None:
        super().__init__(groups, num_local_experts)
        self.group, self.ranks = groups.ep, get_pg_size(groups.ep)
        self.everyone, self.shards = groups.tp_ep, groups.expt_tp
        self.shard = get_pg_rank(groups.expt_tp)
        self.gather = TensorParallel(get_pg_size(groups.expt_tp), True, "expt_tp")

    def start(self, layer: Any, x: torch.Tensor, probs: torch.Tensor, expert_map: torch.Tensor) -> Finish:
        """x [t, h], probs [t, k], expert_map [t, k] -> what returns [t, h]."""
        experts, size = self.count * self.ranks, self.gather.size
        names, build = permute_graph(experts)
        rows, row_probs, counts, offsets, row_map = layer.planned(("permute",), names, build)(x, probs, expert_map)
        known = counts.new_empty(self.ranks * size * experts)
        dist.all_gather_into_tensor(known, counts, group=self.everyone)
        # [shards, source ranks, local experts]: rows that each rank which shares these experts receives, in their order
        local = known.view(self.ranks, size, experts)[:, :, self.first : self.first + self.count]
        chunks = local.transpose(0, 1).contiguous()
        splits = _HostCopy(torch.cat((counts.view(1, self.ranks, -1).sum(2), chunks.sum(2))))
        parts = [rows, row_probs]

        def finish() -> torch.Tensor:
            sent, *received = splits.wait()
            mine, room, leaving = received[self.shard], receive_rows(max(map(sum, received))), len(parts[0])
            inside, inside_probs = (_Exchange.apply(x, self.group, sent, mine, room) for x in parts)
            parts.clear()  # nobody reads them again: they go before the experts run
            x = [inside, inside_probs.unsqueeze(1)]
            del inside, inside_probs
            done = layer.run_experts(self.gather, self.shards, *x, self._map(chunks, room))
            x[:] = [_Exchange.apply(done, self.group, mine, sent, leaving)]
            del done
            names, build = unpermute_graph()
            return layer.planned(("unpermute",), names, build)(row_map, counts, offsets, x.pop())

        del rows, row_probs
        return finish

    def _map(self, chunks: torch.Tensor, room: int) -> torch.Tensor:
        """int32 [shards * room, 1]: the local expert of each received row of each shard, -1 behind the last."""
        ends = chunks.flatten(1).cumsum(1)
        places = torch.arange(room, device=ends.device, dtype=ends.dtype).repeat(len(ends), 1)
        chunk = torch.searchsorted(ends, places, right=True)
        expert = torch.where(chunk < ends.shape[1], chunk % self.count, -1)
        return expert.to(torch.int32).view(-1, 1)


class _HostCopy:
    """Integers on their way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: ``send[i]`` go to rank i, ``receive[i]`` come from it, into a tensor of ``room`` rows. What
    lies behind the received ones is not written, in backward too: nothing reads it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, send: list[int], receive: list[int], room: int) -> torch.Tensor:
        ctx.back = group, receive, send, len(x)
        return _exchanged(x, group, send, receive, room)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchanged(dy, *ctx.back), None, None, None, None


def _exchanged(x: torch.Tensor, group: Any, send: list[int], receive: list[int], room: int) -> torch.Tensor:
    out = x.new_empty((room, *x.shape[1:]))
    dist.all_to_all_single(out[: sum(receive)], x[: sum(send)].contiguous(), receive, send, group=group)
    return out
