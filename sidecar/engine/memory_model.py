"""
How much memory a prompt needs: a model of it, which memory_fit measures.

A prefill chunk costs a share per token of the chunk, one per token and depth (attention
that is not fused), and the old buffers of the layers that grow by copying at a time.
From that the largest context that fits now follows, before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from sidecar.core.errors import InsufficientMemory
from sidecar.engine.process_memory import NOTHING, Demand, ProcessMemory
from sidecar.kv.kv_layers import ROOM_STEP, buffer_length

_SMALLEST_CHUNK = 64
SEGMENT = 256  # tokens that a recurrent layer takes at a time (mlx-lm's ssm_attn)
_LEAST_GROWING = 512 << 20  # bytes: buffers that are small are in flight all at once
_SAFETY = 1.1


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """
    Bytes a sequence holds, and a prefill takes beyond that.

    Args:
        kv_per_token: KV of one token, all layers that keep every token.
        per_token, per_pair: cost of a chunk's token, and of a token at a depth.
        fixed: state that does not grow: recurrent layers, full windows.
        plain_per_token, plain_until: the same while not yet quantised (KV_BITS).
        buffers: of the device's, that a sequence lies in.
        growing_share: of KV, what is held twice while a chunk's layers grow.
        per_square: of a token with each of its segment, in recurrent layers.
    """

    kv_per_token: float
    per_token: float
    per_pair: float
    fixed: int = 0
    plain_per_token: float = 0.0
    plain_until: int = 0
    buffers: int = 0
    growing_share: float = 1.0
    per_square: float = 0.0

    def kv_bytes(self, depth: int) -> int:
        """Most that a sequence of `depth` tokens has held on its way."""
        plain = self.plain_per_token * min(depth, self.plain_until)
        return self.fixed + int(max(self.kv_per_token * depth, plain))

    def peak_bytes(self, depth: int, chunk_len: int) -> int:
        """Highest use, beyond what is held, of a chunk that ends at `depth`."""
        own = self.per_token * chunk_len + self.per_pair * chunk_len * depth
        own += self.per_square * chunk_len * min(chunk_len, SEGMENT)
        held = self.kv_bytes(depth)
        growth = min(held, max(self.growing_share * held, _LEAST_GROWING))
        return int(_SAFETY * (own + growth + self.kv_per_token * chunk_len))

    def demand(self, length: int, num_copies: int = 1) -> Demand:
        """
        What a prompt takes with small chunks, until its first token.

        Args:
            num_copies: answers that decode side by side, each with KV of its own.
        """
        held = num_copies * self.kv_bytes(buffer_length(length + ROOM_STEP))
        peak = self.peak_bytes(length, _SMALLEST_CHUNK)
        return Demand(held, peak, num_copies * self.buffers)

    def rest(self, length: int, num_copies: int, done: int) -> Demand:
        """What is left of a prompt's demand once `done` tokens of it are held."""
        whole = self.demand(length, num_copies)
        held = max(0, whole.held - self.kv_bytes(done))
        return Demand(held, whole.peak, whole.buffers - self.buffers)

    def largest_context(
        self,
        free_bytes: int,
        maximum: int,
        others: Demand = NOTHING,
        num_copies: int = 1,
    ) -> int:
        """The longest prompt that fits into `free_bytes` beside what others need."""
        low, high = 0, maximum
        while low < high:
            middle = (low + high + 1) // 2
            if (others + self.demand(middle, num_copies)).total <= free_bytes:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class TowerCost:
    """
    Of an image, by the number of ids that stand for it.

    Args:
        per_id, per_pair: bytes while the tower runs, for each id and for each two of
            them (attention that is not fused). kept: bytes of what it gives, an id.
        id_s: seconds, an id.
    """

    per_id: float
    per_pair: float
    kept: float
    id_s: float

    def peak_bytes(self, num_ids: int) -> int:
        """Most that is in use while the tower runs, pixels included."""
        return int(_SAFETY * (self.per_id * num_ids + self.per_pair * num_ids**2))

    def demand(self, images: Sequence[int]) -> Demand:
        """
        Of images that are looked at one after another.

        Args:
            images: the numbers of their ids.
        """
        if not images:
            return NOTHING
        return Demand(int(self.kept * sum(images)), self.peak_bytes(max(images)))


class MemoryGuard:
    """
    The process's memory as one model's prompts see it.

    Args:
        model: what this model's prompts take. tower: what its images take besides;
            None: it takes text only.
    """

    def __init__(
        self,
        model: MemoryModel,
        process: ProcessMemory,
        tower: TowerCost | None = None,
    ) -> None:
        self.model = model
        self.process = process
        self.tower = tower

    def largest_context(
        self, maximum: int, others: Demand = NOTHING, num_copies: int = 1
    ) -> int:
        """The longest prompt that fits now, at most `most` tokens."""
        free_bytes = self.process.free_bytes
        return self.model.largest_context(free_bytes, maximum, others, num_copies)

    def images(self, lengths: Sequence[int]) -> Demand:
        """What images take that are still to be looked at, by the number of ids."""
        return self.tower.demand(lengths) if self.tower else NOTHING

    def demand(
        self,
        length: int,
        num_copies: int,
        maximum: int,
        others: Demand,
        images: Demand = NOTHING,
    ) -> Demand:
        """
        What a prompt of that length takes.

        Raises:
            InsufficientMemory: it does not fit beside the others.
        """
        if length >= self.largest_context(maximum, others + images, num_copies):
            why = self.refusal(length, num_copies, maximum, others, images)
            raise InsufficientMemory(why, param="messages", retry_after_s=5)
        needed = self.model.demand(length, num_copies) + images
        free = self.process.free_buffers - others.buffers
        if needed.buffers > free:
            why = (
                f"the request needs {needed.buffers} buffers of the device's, and "
                f"{max(0, free)} of {self.process.limit_buffers} are left"
            )
            raise InsufficientMemory(why, param="messages", retry_after_s=5)
        return needed

    def refusal(
        self,
        length: int,
        num_copies: int,
        maximum: int,
        others: Demand = NOTHING,
        images: Demand = NOTHING,
    ) -> str:
        """Say of a prompt that does not fit what it needs, and what would."""
        needed = (self.model.demand(length, num_copies) + images).total
        own = images.total >> 20
        share = f" ({own} of them for its images)" if own else ""
        left = max(0, self.process.free_bytes - others.held)
        largest = self.largest_context(maximum, others + images, num_copies)
        return (
            f"a prompt of {length} tokens needs {needed >> 20} MiB{share}, and "
            f"{left >> 20} MiB of {self.process.limit_bytes >> 20} MiB are left: the "
            f"largest context that fits now is {largest} tokens"
        )

    def fitting_chunk(self, depth: int, chunk_len: int) -> int:
        """A chunk that stays below the limit at this depth, at least 64 tokens."""
        room = self.process.limit_bytes - mx.get_active_memory()
        while chunk_len > _SMALLEST_CHUNK:
            if self.model.peak_bytes(depth + chunk_len, chunk_len) <= room:
                break
            chunk_len = max(_SMALLEST_CHUNK, chunk_len // 2)
        return chunk_len
