"""Copies small arrays between host and device without waiting, through pinned buffers in rotation.

A buffer is refilled only after the event that ends its last copy. On the CPU nothing is copied.
"""

import time
from collections.abc import Iterable

import numpy as np
import torch

from nanovllm.engine.batch import StepLogprobs
from nanovllm.engine.logprobs import StepReports
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import TIMEOUT, PeerLostError
from nanovllm.utils.waiting import wait_until

NUM_BUFFERS = 16  # a step sends and fetches up to five times, and two steps may be under way
ALIGNMENT = 2  # elements: Triton specialises on 16-byte alignment, so every array gets it


def aligned(size: int) -> int:
    """Returns `size` elements rounded up, so that what follows is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _PinnedBuffer:
    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.array = self.tensor.numpy()
        self.copied = torch.cuda.Event()


def wait_for(event: torch.cuda.Event, group: TPGroup) -> None:
    """Waits for `event`; raises `PeerLostError` if another rank is lost or hangs.

    With ranks it waits in pieces, since Python serves signals only between them.
    """
    if group.size == 1:
        event.synchronize()
        return
    deadline = time.monotonic() + TIMEOUT.total_seconds()

    def check() -> None:
        if time.monotonic() > deadline:
            raise PeerLostError(f"a step has not ended within {TIMEOUT}")

    wait_until(event.query, check)
    group.check()  # if it has passed because nobody waits any more


def _as_8_bytes(array: np.ndarray) -> np.ndarray:
    """Returns a float64 array as it is, any other as int64."""
    return array if array.dtype == np.float64 else array.astype(np.int64, copy=False)


class HostToDevice:
    """Sends small arrays to the device."""

    def __init__(self, device: torch.device, group: TPGroup) -> None:
        self._device = device
        self._group = group
        self._buffers: list[_PinnedBuffer] = []

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Sends arrays of any lengths in one copy; returns tensors of the same lengths.

        float64 arrays become float64 tensors, all others int64 tensors.
        """
        on_host = [torch.from_numpy(_as_8_bytes(array)) for array in arrays]
        if self._device.type != "cuda":
            return on_host
        sizes = [aligned(len(tensor)) for tensor in on_host]
        buffer = self._next_buffer(sum(sizes))
        offset = 0
        for tensor, size in zip(on_host, sizes, strict=True):
            buffer.array[offset : offset + len(tensor)] = tensor.numpy().view(np.int64)
            offset += size
        on_device = buffer.tensor[:offset].to(self._device, non_blocking=True).split(sizes)
        buffer.copied.record()
        pairs = zip(on_device, on_host, strict=True)
        return [piece[: len(tensor)].view(tensor.dtype) for piece, tensor in pairs]

    def _next_buffer(self, size: int) -> _PinnedBuffer:
        """Returns the least recently used buffer, once it is free, with room for `size` numbers."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(_PinnedBuffer(1 << max(size - 1, 1023).bit_length()))
        else:
            self._buffers.append(self._buffers.pop(0))
        buffer = self._buffers[-1]
        wait_for(buffer.copied, self._group)
        if len(buffer.array) < size:
            buffer = self._buffers[-1] = _PinnedBuffer(1 << (size - 1).bit_length())
        return buffer


class FetchedIds:
    """A `StepHandle` whose ids and reports are on the host once `event` has passed."""

    def __init__(
        self,
        ids: torch.Tensor,
        event: torch.cuda.Event | None,
        group: TPGroup,
        reports: StepReports,
    ) -> None:
        self._ids = ids
        self._event = event
        self._group = group
        self._reports = reports

    def token_ids(self) -> list[int]:
        if self._event is not None:
            wait_for(self._event, self._group)
        return self._ids.tolist()

    def logprobs(self) -> StepLogprobs:
        return self._reports.merged()


class DeviceToHost:
    """Fetches ids, int64, at most `capacity` at a time, from the device.

    A result must be read before `NUM_BUFFERS` more are fetched.
    """

    def __init__(self, device: torch.device, capacity: int, group: TPGroup) -> None:
        self._is_cuda = device.type == "cuda"
        self._group = group
        self._buffers = [
            _PinnedBuffer(capacity) for _ in range(NUM_BUFFERS if self._is_cuda else 0)
        ]

    def fetch(self, parts: Iterable[torch.Tensor], reports: StepReports) -> FetchedIds:
        """Fetches the parts one after the other, int64 [n] each.

        The copy of each is queued before the next part is made, which may overwrite it.
        reports: to which the parts add, as they are made.
        """
        if not self._is_cuda:
            return FetchedIds(torch.cat(list(parts)), None, self._group, reports)
        buffer, size = self._buffers.pop(0), 0
        self._buffers.append(buffer)
        for ids in parts:
            buffer.tensor[size : size + len(ids)].copy_(ids, non_blocking=True)
            size += len(ids)
        buffer.copied.record()
        return FetchedIds(buffer.tensor[:size], buffer.copied, self._group, reports)
