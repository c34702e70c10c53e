"""Fingerprints: evidence that a tensor still has the bytes it had.

[Note: fingerprints]
A version counter detects writes through autograd. Fused optimizers, ``p.data``, quantised optimizers and merged
adapters write without changing it, and a recompute may differ for unforeseen reasons. So all operands and results of a
recompute have a fingerprint of their original bytes: a few hundred elements spread over a tensor of any size, or sums
over all bytes.

Nothing here waits for a device. On the host a comparison is synchronous; on an accelerator its result is a tensor,
which is read once the device has computed it (``ebbtide.engine.trust``).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from enum import Enum
from typing import Any, NamedTuple

import torch

from ebbtide.engine.layout import KNOWN_LAYOUTS, Layout
from ebbtide.engine.modes import outside_modes

SAMPLED = 256
"""Elements in a sample, on the host those of one 8-byte word together. Of scattered changes that touch 2 % of the
elements, one in 170 is missed; of changes that touch 5 %, one in 500,000."""

ROUNDINGS = {2: 2, 4: 64, 8: 64}
"""Bytes of a float → the number of its smallest steps, at the largest value, that count as rounding."""

HELD_BYTES = 16 * 1024
"""Up to this size, in bytes, a host tensor whose bytes are all compared is held instead of summed."""

SUMMED_BYTES = 32 * 1024**2
"""Most bytes of a device that are summed at once: a tensor that is not contiguous is copied for it."""

STRETCHES = 16
"""Parts of a tensor that are summed separately, if all bytes are covered."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE

_key = torch._C.DispatchKey
_PLAIN_KEYS = functools.reduce(
    operator.or_, map(torch._C.DispatchKeySet, (_key.CPU, _key.ADInplaceOrView, _key.AutogradCPU, _key.AutocastCPU))
).raw_repr()
"""Dispatch keys of a plain tensor of the host, whose memory is its values; every other kind has another set: a wrapper,
a view that negates, another layout, a tensor of inference mode."""

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Types of which, on the host, kernels save no memory that was never written."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_IS_WORD = frozenset(_WORDS.values())

_WORD = 8
"""Bytes of host memory that are read together."""

_SomeBytes, _SomeWords = ctypes.c_char * sys.maxsize, ctypes.c_int64 * (sys.maxsize // _WORD)
"""Memory of any size: a class for each size takes 3 KB, and is a cycle that waits for the garbage collector."""


class Compared(Enum):
    """How a block's recomputed and reread tensors are compared with the originals."""

    NOT = "not"
    SAMPLE = "sample"
    FULL = "full"


class Fingerprint:
    """A digest of a tensor's bytes. See [Note: fingerprints].

    Args:
        tensor: A strided tensor with its own memory.
        full: Cover all bytes, in addition to the sample.
    """

    __slots__ = ("_flat", "_sample", "_sums")

    def __init__(self, tensor: torch.Tensor, *, full: bool = False) -> None:
        self._flat, nbytes = tensor.is_contiguous(), tensor.numel() * tensor.itemsize
        if self._flat and tensor.is_cpu:
            self._sample = _read(tensor, all_of_it=full and nbytes <= HELD_BYTES)
        else:
            self._sample = _sample(tensor, flat=self._flat)
        covered = len(self._sample) if isinstance(self._sample, bytes) else self._sample.nbytes
        self._sums = _sums(tensor) if full and covered < nbytes else None

    def same(self, tensor: torch.Tensor) -> torch.Tensor | bool:
        """Compare with a tensor of the same type and shape.

        Returns:
            Whether the bytes are the same; on an accelerator a tensor of one boolean, without waiting for it.
        """
        before = self._sample
        if self._flat and tensor.is_cpu:
            plain = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
            now = _read(plain, all_of_it=len(before) == tensor.numel() * tensor.itemsize)
        else:
            now = _sample(tensor, flat=self._flat)
        if isinstance(now, bytes):
            return now == before and (self._sums is None or torch.equal(_sums(tensor), self._sums))
        if isinstance(before, bytes) or now.shape != before.shape or now.dtype != before.dtype:
            return False
        equal = (now == before).all()
        return equal if self._sums is None else equal & (_sums(tensor) == self._sums).all()

    def nearly_same(self, tensor: torch.Tensor) -> bool:
        """Whether the sample of a tensor of the host differs from the first one's by rounding at most."""
        before = self._sample
        if not isinstance(before, bytes) or not tensor.is_cpu:
            return False
        plain = tensor.detach().contiguous() if self._flat else tensor.detach()[_steps(tensor.shape)].contiguous()
        now = _read(plain, all_of_it=not self._flat or len(before) == plain.numel() * plain.itemsize)
        return _bytes_nearly_equal(before, now, tensor.dtype)


def can_be_taken(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strided memory of its own that a fingerprint can be taken of."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if torch._C._get_dispatch_mode(_FAKE) is not None:  # operators make no values
        return False
    plain = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    plain = plain and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    return plain and tensor.device.type != "meta" and tensor.numel() > 0


class _Laid(NamedTuple):
    """How elements lie in the memory of the host, and what is read of them.

    Attributes:
        kind: The type that memory is read as.
        part: Which of its elements are read.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: type[ctypes.Array[Any]]
    part: slice


class Sample(tuple[_Laid, bytes]):
    """What was read of a tensor of the host, and how its elements lay."""

    __slots__ = ()

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this sample, by its elements in the same order."""
        laid, before = self
        if tensor.dtype is not laid.dtype or tensor.shape != laid.size:
            return False  # its elements would not fit into memory of that layout
        plain = type(tensor) is torch.Tensor and torch._C._dispatch_keys(tensor).raw_repr() == _PLAIN_KEYS
        if plain and tensor.stride() == laid.stride:
            memory = memoryview(laid.kind.from_address(tensor.data_ptr()))
            if memory[laid.part].tobytes() == before:  # as in ``_read``
                return True
        return self._read(tensor) == before

    def nearly_same(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor differs by rounding at most from one with this sample."""
        laid, before = self
        same_kind = tensor.dtype is laid.dtype and tensor.shape == laid.size
        return same_kind and _bytes_nearly_equal(before, self._read(tensor), laid.dtype)

    def _read(self, tensor: torch.Tensor) -> bytes:
        laid = self[0]
        return _read(torch.empty_strided(laid.size, laid.stride, dtype=laid.dtype, device="cpu").copy_(tensor.detach()))


@functools.lru_cache(maxsize=KNOWN_LAYOUTS)
def _laid(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> _Laid | None:
    """Return how a tensor is read; None if it has no elements, or they are no floats or have gaps between them."""
    layout = Layout(dtype, size, stride, 0)
    if dtype not in _FLOATS or not layout.dense or not layout.logical_bytes:
        return None
    return _Laid(size, stride, dtype, *_taken(layout.logical_bytes // dtype.itemsize, dtype.itemsize, False))


def host_sample(tensor: torch.Tensor) -> Sample | None:
    """Return a sample of a tensor of floats of the host that lie without gaps, in the order of its memory.

    For what is read of every saved tensor: it costs a third of a fingerprint, and takes as few calls as can be.

    Returns:
        None for all other tensors: those take a ``Fingerprint``.
    """
    if type(tensor) is not torch.Tensor or torch._C._dispatch_keys(tensor).raw_repr() != _PLAIN_KEYS:
        return None
    laid = _laid(tensor.shape, tensor.stride(), tensor.dtype)
    if laid is None:
        return None
    memory = memoryview(laid.kind.from_address(tensor.data_ptr()))
    return Sample((laid, memory[laid.part].tobytes()))  # as in ``_read``


def all_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, also where they are no numbers."""
    if one.is_floating_point() and one.shape == other.shape:
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)


def nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of floats differ by no more than sums that are added up in another order."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point() or one.itemsize < 2:
        return False
    largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max() if one.numel() else 0.0
    tolerance = ROUNDINGS[one.itemsize] * torch.finfo(one.dtype).eps * float(largest)
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)


def _bytes_nearly_equal(one: bytes, other: bytes, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or len(one) != len(other):
        return False
    return nearly_equal(*(torch.frombuffer(bytearray(x), dtype=dtype) for x in (one, other)))


def is_cast_of(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether, in a sample, a tensor holds what casting ``source`` to its type gives. Reads host memory only."""
    steps = _steps(tensor.shape)
    return torch.equal(tensor.detach()[steps], source.detach()[steps].to(tensor.dtype))


def _sample(tensor: torch.Tensor, *, flat: bool) -> bytes | torch.Tensor:
    """Return some elements: their bytes from host memory, or a tensor of integers on a device.

    As floats, NaNs would not equal themselves.

    Args:
        tensor: The tensor.
        flat: On a device, take every n-th element in the order of the elements, as from contiguous memory; else a grid.
    """
    if tensor.device.type != "cpu":
        return _on_device(tensor.detach(), flat=flat).clone()
    return _read(tensor.detach()[_steps(tensor.shape)].contiguous(), all_of_it=True)


def _read(tensor: torch.Tensor, *, all_of_it: bool = False) -> bytes:
    """Return bytes of a tensor of the host whose elements lie without gaps: every n-th word of 8 bytes, or all of them.

    Read directly, because each operator would cost more than the read. The cost is that of each address, which is in
    no cache any more; so neighbours are read together.
    """
    kind, part = _taken(tensor.numel(), tensor.itemsize, all_of_it)
    return memoryview(kind.from_address(tensor.data_ptr()))[part].tobytes()


@functools.lru_cache(maxsize=1024)
def _taken(elements: int, size: int, all_of_it: bool) -> tuple[type[ctypes.Array[Any]], slice]:
    """Return the type that memory is read as (bytes or words), and which of them are read: all, or every n-th.

    Args:
        elements: Elements of the tensor.
        size: Bytes of one.
        all_of_it: Take all.
    """
    words, places = elements * size // _WORD, SAMPLED // 2 if size in (2, 4) else SAMPLED
    if all_of_it or elements <= SAMPLED or words <= places:
        return _SomeBytes, slice(elements * size)
    return _SomeWords, slice(0, words, words // places | 1)  # odd: no walk along one column of a matrix


def _on_device(plain: torch.Tensor, *, flat: bool) -> torch.Tensor:
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    contiguous, count = plain.is_contiguous(), plain.numel()
    if plain.dtype is torch.uint8 and count >= 8 * SAMPLED and contiguous:
        first = -int(plain.storage_offset()) % 8
        plain = plain.view(-1)[first : first + (count - first) // 8 * 8].view(torch.int64)
        count = plain.numel()
    if count > SAMPLED:
        if flat:
            step = count // SAMPLED | 1  # odd: no walk along one column of a matrix whose width is a power of two
            taken = -(-count // step)
            if contiguous:
                plain = plain.as_strided((taken,), (step,), plain.storage_offset())
            else:
                plain = plain.reshape(-1)[::step]
        else:
            plain = plain[_steps(plain.shape)]
    return plain if plain.dtype in _IS_WORD else plain.view(_WORDS[plain.itemsize])


@functools.lru_cache(maxsize=1024)
def _steps(shape: torch.Size) -> tuple[slice, ...]:
    """Return a slice for each dimension of a tensor, which together take about ``SAMPLED`` elements."""
    steps, left = [1] * len(shape), SAMPLED
    for taken, index in enumerate(sorted(range(len(shape)), key=shape.__getitem__)):
        wanted = max(1, round(left ** (1 / (len(shape) - taken))))
        steps[index] = max(1, -(-shape[index] // wanted))
        left = max(1, left // -(-shape[index] // steps[index]))
    return tuple(slice(None, None, step) for step in steps)


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    return outside_modes(_summed, tensor)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over stretches that together cover all bytes, in an order that follows from the shape alone."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes > SUMMED_BYTES and not tensor.is_cpu:
        longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        return torch.cat([_summed(part) for part in tensor.detach().chunk(-(-nbytes // SUMMED_BYTES), longest)])
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    even = data.numel() // (8 * STRETCHES) * (8 * STRETCHES)
    sums = data[:even].view(torch.int64).view(STRETCHES, -1).sum(1)
    return torch.cat([sums, data[even:].to(torch.int64)])
