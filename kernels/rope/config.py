"""How the heads of a token are spread over threads: plain numbers, without the compiler.

A head is cut into vectors, two of which make a *unit*, what one thread turns at a time: channel i of a half-split
rotation and the channel i + half that it turns with, or two vectors of channels that are not turned. ``lanes`` threads
share a head, a power of two within a warp, so that sums over a head are shuffles. The lanes that work together are a
*slot*. A token's slots share out its queries, ``rounds`` that follow each other to each, so that a slot's addresses
differ by constants; slot g also has the key and the value of KV group g."""

from __future__ import annotations

import dataclasses
import math

VECTOR_BYTES = 16
MOST_UNITS = 4  # of one head in a thread
THREADS = (64, 128, 256)
_IN_FLIGHT = 288  # bytes that a thread has on their way at most: 9 heads in units of 16 byte vectors, 72 registers
_ALONE = 64  # the same without keys, where slots of few heads leave no thread idle: registers for more threads
STREAMED = 32 << 20  # bytes of results from which on their readers find little of them in L2


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """``head_dim`` channels of ``itemsize`` bytes, an even number, of which the first ``2 * half`` are turned."""

    head_dim: int
    half: int
    itemsize: int

    @property
    def vector(self) -> int:
        """Channels of one access: 16 bytes' worth where both halves of the turned channels and of the others divide by
        that many."""
        return math.gcd(self.half, (self.head_dim - 2 * self.half) // 2, VECTOR_BYTES // self.itemsize)

    @property
    def units(self) -> int:
        return self.head_dim // (2 * self.vector)

    @property
    def turned(self) -> int:
        """Units of turned channels; they come first."""
        return self.half // self.vector

    @property
    def lanes(self) -> int:
        return min(32, 1 << (self.units - 1).bit_length())

    @property
    def per_lane(self) -> int:
        """Units of a head that a thread takes: ``lane``, ``lane + lanes``, ..."""
        return -(-self.units // self.lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A block of ``threads`` for tokens of ``queries`` heads, and where ``keys`` is not 0 as many keys and as many
    values. ``rounds`` divides the queries of a KV group, or all where there are no keys."""

    span: Span
    queries: int
    keys: int
    threads: int
    rounds: int

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.threads // self.span.lanes

    @property
    def per_token(self) -> int:
        """Slots that a token takes."""
        return self.queries // self.rounds

    @property
    def steps(self) -> int:
        """Heads of a slot: its queries, then its key and its value."""
        return self.rounds + (2 if self.keys else 0)

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        return max(1, self.slots // self.per_token)

    @property
    def splits(self) -> int:
        """Blocks that share one token."""
        return -(-self.per_token // self.slots)


def rounds_of(span: Span, queries: int, keys: int) -> int:
    """The most queries of a slot whose loads a thread can have in flight at once."""
    of_head = 2 * span.vector * span.itemsize * span.per_lane
    most = max(1, _IN_FLIGHT // of_head - 2 if keys else _ALONE // of_head)
    share = queries // keys if keys else queries
    return max(r for r in range(1, min(most, share) + 1) if share % r == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Knobs:
    """``threads`` of a block; ``rounds`` queries of a slot; ``ahead``: a thread goes from token to token and reads one
    ahead through shared memory; ``resident`` blocks share a multiprocessor, by their registers too; ``streaming``: L2
    may drop what is written first."""

    threads: int
    rounds: int
    ahead: bool
    resident: int
    streaming: bool


def knobs(span: Span, queries: int, keys: int, *, layer: bool, backward: bool, tables: int, smem: int,
          nbytes: int) -> Knobs:  # fmt: skip
    """The choice for a kernel with ``tables`` rotations of a token (queries' and keys' positions differ: 2),
    ``smem`` bytes of shared memory on a multiprocessor and results of ``nbytes``. ``layer``: with a layer_norm;
    ``backward``: of the norm, whose large results are streamed (H200, llama's heads: 153 us instead of 156; others
    gain 1 % without). Registers are estimates, checked by compiling."""
    rounds = rounds_of(span, queries, keys)
    tile = Tile(span, queries, keys, 128, rounds)
    # a token in one block where that is enough; few threads fit many registers to a multiprocessor in small steps
    threads = min(max(64 if backward else 128, -(-tile.per_token * span.lanes // 32) * 32), 256)
    tile = Tile(span, queries, keys, threads, rounds)
    numbers = 2 * span.vector * span.per_lane  # of a head in a thread
    words = -(-numbers * span.itemsize // 4)
    ahead = backward and can_read_ahead(tile, smem, 1, backward=True)
    registers = (40 if keys else 24) + numbers * tables
    registers += 2 * words + 5 * numbers if backward else tile.steps * words + numbers * layer
    resident = max(1, min(_REGISTERS // (threads * -(-min(registers, 255) // 8) * 8), 16))
    if ahead:
        resident = max(r for r in range(1, resident + 1) if can_read_ahead(tile, smem, r, backward=backward))
    return Knobs(threads, rounds, ahead, resident, backward and nbytes >= STREAMED)


_REGISTERS = 65536  # of a multiprocessor


def can_read_ahead(tile: Tile, smem: int, resident: int, *, backward: bool) -> bool:
    """Whether cp.async moves the vectors, and so many blocks fit the shared memory: a token's heads, in the backward of
    a norm their gradients too and four sums over the block's warps."""
    span = tile.span
    need = tile.steps * (2 if backward else 1) * 2 * span.per_lane * span.vector * span.itemsize * tile.threads + 1024
    need += 4 * 4 * span.head_dim * tile.threads // 32 if backward else 0
    return span.vector * span.itemsize >= 4 and need * resident <= smem


def refusal(chosen: Knobs, span: Span, queries: int, keys: int, *, backward: bool, smem: int) -> str | None:
    """Why a kernel cannot run with these knobs, None where it can."""
    share = queries // keys if keys else queries
    if chosen.threads not in range(max(32, span.lanes), 1025, 32):
        return f"threads = {chosen.threads}: whole warps, 1024 threads at most"
    if chosen.rounds < 1 or share % chosen.rounds:
        return f"rounds = {chosen.rounds}: must divide the {share} queries of a {'group' if keys else 'token'}"
    if not 1 <= chosen.resident <= 32 or chosen.resident * chosen.threads > 2048:
        return f"resident = {chosen.resident}: at least 1, and 2048 threads at most"
    tile = Tile(span, queries, keys, chosen.threads, chosen.rounds)
    if chosen.ahead and not can_read_ahead(tile, smem, chosen.resident, backward=backward):
        blocks = f"{chosen.resident} blocks of {chosen.threads} threads"
        return f"ahead with {blocks}: more shared memory than there is, or vectors of 2 bytes"
    return None
