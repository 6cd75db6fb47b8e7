"""Layouts of fake tensors: copied and compared without guards and symbolic arithmetic.

A result is represented by a torch fake tensor, with symbols for sizes. In a restored graph that
runs without a compiler it is a tensor on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch


class _Memory(Tensor):
    """A tensor without data that carries memory and a layout into a :class:`FakeTensor`."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{function} of what only carries a layout")


def memory_of(tensor: Tensor) -> int:
    """An id of a tensor's storage: equal for tensors in the same memory, including fake ones."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class Layout:
    """How one fake tensor is stored in memory, to create others like it.

    torch computes with symbolic sizes whenever it creates a tensor or checks a view, which takes a
    fraction of a millisecond each time. Here this happens once, for the first tensor.

    Attributes:
        num_bytes: size of the storage, which may be larger than the tensor.
        mode: None for a tensor on the meta device.
    """

    mode: FakeTensorMode | None
    sizes: tuple[Any, ...]
    steps: tuple[Any, ...]
    offset: Any
    num_bytes: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, fake: Tensor) -> Layout:
        """The layout of ``fake``, which must be strided."""
        return cls(
            fake.fake_mode if isinstance(fake, FakeTensor) else None,
            tuple(fake.shape),
            tuple(fake.stride()),
            fake.storage_offset(),
            fake.untyped_storage().nbytes(),
            fake.dtype,
            fake.device,
            fake.requires_grad,
        )

    def new(self) -> Tensor:
        """A tensor of this layout in new memory."""
        if self.mode is None:
            memory = torch.UntypedStorage(self.num_bytes, device="meta")
            empty = torch.empty(0, dtype=self.dtype, device="meta")
            return self._fake(empty.set_(memory, self.offset, self.sizes, self.steps))
        with no_dispatch():
            made = Tensor._make_wrapper_subclass(
                _Memory,
                self.sizes,
                strides=self.steps,
                storage_offset=self.offset,
                dtype=self.dtype,
                device=torch.device("meta"),
                storage_size=self.num_bytes,
            )
            return self._fake(made)

    def within(self, other: Tensor) -> Tensor:
        """A tensor of this layout in the memory of ``other``, which must be large enough."""
        with no_dispatch():
            # A view computes no sizes, but its base must not be a fake tensor.
            made = torch.empty(0, dtype=self.dtype, device="meta")
            made.set_(other.untyped_storage(), 0, (0,), (1,))
            return self._fake(made.as_strided(self.sizes, self.steps, self.offset))

    def _fake(self, made: Tensor) -> Tensor:
        fake = made if self.mode is None else FakeTensor(self.mode, made, self.device)
        if self.requires_grad:
            fake.requires_grad_()
        return fake


def fake_of(constant: Tensor, beside: Tensor) -> Tensor:
    """The fake tensor for ``constant`` in the graph that contains ``beside``."""
    if isinstance(beside, FakeTensor):
        return beside.fake_mode.from_tensor(constant, static_shapes=True)
    return meta_of(constant)


def meta_of(constant: Tensor) -> Tensor:
    """A tensor without data that is otherwise like ``constant``."""
    shape, strides = constant.shape, constant.stride()
    made = torch.empty_strided(shape, strides, dtype=constant.dtype, device="meta")
    return made.requires_grad_(constant.requires_grad)


def layout_key(fake: Tensor) -> tuple[Any, ...]:
    """Equal for tensors with the same layout in memory; compared without adding a guard."""
    sizes = (*fake.shape, *fake.stride(), fake.storage_offset())
    return fake.dim(), expressions(sizes), fake.dtype, fake.device, fake.requires_grad


def expressions(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """The sympy expressions of symbolic sizes: comparing these adds no guard."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes)
