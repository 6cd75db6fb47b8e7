"""The weight map: from the name of a checkpoint's tensor to all places that contain its value.

::

    name ──► regions of parameters ──► this rank's part ──► storage, or row range of a merged one
             (names, converters)       (Cut)                ├─► packed copies, made again
                                                            └─► quantised parts, written by row

Loading, sharding and the passes record where they put a weight, with one call each
(:class:`WeightRecord`). A parameter that is merged with others stays a view of the merged storage,
so only values derived from it need a record. :class:`WeightMap` reads the record. Names are
resolved on first use, so a start only pays for the record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import InvalidInputError
from ..kernels.matmul.quantized.quantized_weight import QuantizedWeight, is_same_order


def stand_in(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(*shape)


def is_stand_in(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not any(tensor.stride())


Pack = Callable[[Any], Sequence[Tensor]]
"""Returns the parts that a kernel reads, from a quantised weight whose inputs are in order."""


class Cut(NamedTuple):
    """A rank's part of a parameter.

    Attributes:
        dim: the dimension that is cut.
        spans: ``(begin, end)`` along it; back to back in the rank's tensor.
    """

    dim: int
    spans: tuple[tuple[int, int], ...]


class Place(NamedTuple):
    """The place of (a part of) a checkpoint's tensor.

    Attributes:
        storage: the tensor that the graph reads.
        slice: of ``storage``; for a packed or quantised storage, the rows of the matrix in it.
        transform: the conversions of the checkpoint's value, in order.
        shard: this rank's part of the parameter; None for all of it.
    """

    storage: Tensor
    slice: tuple[slice, ...]
    transform: tuple[str, ...]
    shard: Cut | None


@dataclass(frozen=True, slots=True)
class Region:
    """The box of a parameter that a checkpoint's tensor fills.

    Attributes:
        parameter: its name.
        begin, sizes: of the box, per dimension of the whole parameter.
        dims: for each dimension of the parameter, that of the tensor; None where the box is one
            element wide and the tensor has no such dimension.
        source: the first element to read, per dimension of the tensor.
        notes: descriptions of further conversions of the value.
    """

    parameter: str
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    source: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, parameter: str, shape: Sequence[int]) -> Region:
        zeros = (0,) * len(shape)
        return cls(parameter, zeros, tuple(shape), tuple(range(len(shape))), zeros)

    def within(self, cut: Cut | None) -> list[Region]:
        """The boxes in a rank's tensor; empty if the rank has no part of the region."""
        if cut is None:
            return [self]
        found, offset, dim = [], 0, cut.dim
        for begin, end in cut.spans:
            first = max(begin, self.begin[dim])
            last = min(end, self.begin[dim] + self.sizes[dim])
            if first < last:
                source, own = list(self.source), self.dims[dim]
                if own is not None:
                    source[own] += first - self.begin[dim]
                found.append(
                    replace(
                        self,
                        begin=_with(self.begin, dim, offset + first - begin),
                        sizes=_with(self.sizes, dim, last - first),
                        source=tuple(source),
                    )
                )
            offset += end - begin
        return found

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + n) for b, n in zip(self.begin, self.sizes, strict=True))

    def part_of(self, value: Tensor) -> Tensor:
        """The part of the checkpoint's tensor that fills the box, in the box's shape; a view."""
        sizes = {d: n for d, n in zip(self.dims, self.sizes, strict=True) if d is not None}
        index = tuple(slice(b, b + sizes[d]) for d, b in enumerate(self.source))
        part = value[index].permute([d for d in self.dims if d is not None])
        return part[tuple(None if d is None else slice(None) for d in self.dims)]

    @property
    def transform(self) -> tuple[str, ...]:
        order = [d for d in self.dims if d is not None]
        turned = () if order == sorted(order) else (f"permuted to {tuple(order)}",)
        return (*self.notes, *turned)


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Changes(NamedTuple):
    """The changes of a model's parameters for new values of a checkpoint's tensors.

    Attributes:
        values: regions of parameters, with the checkpoint's tensor.
        quantized: whole parameters that are quantised, by name.
    """

    values: list[tuple[Region, Tensor]]
    quantized: dict[str, QuantizedWeight]


class WeightNames(Protocol):
    """The names of a checkpoint's tensors."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors of the checkpoint."""

    @property
    def ties(self) -> Sequence[Sequence[str]]:
        """Groups of two or more names of tensors that, if equal, are one parameter of the
        module."""

    def regions(self, name: str) -> Sequence[Region]:
        """The regions that the tensor fills. Raises InvalidInputError, by name, if they are
        unknown."""

    def changes(self, values: Mapping[str, Tensor], held: Mapping[str, Any]) -> Changes:
        """Args:
            held: the quantised parameters, by name.

        Raises:
            InvalidInputError: a name, a shape or a dtype differs from the checkpoint's.
        """


class _Copy(NamedTuple):
    targets: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]
    make: Callable[[], Sequence[Tensor]]
    what: str


class Held(NamedTuple):
    """A parameter's rows in a quantised matrix.

    Attributes:
        parts: what the kernel reads. pack: computes them from the whole matrix; None if only a
            start can.
        begin, num_rows: first row of the parameter, and number of rows of the matrix.
        order: the order of the inputs; None for their own order.
        what: description of the format of the matrix.
    """

    parts: tuple[Any, ...]
    pack: Pack | None
    begin: int
    num_rows: int
    order: Tensor | None
    what: str


@dataclass(slots=True)
class WeightRecord:
    """Where the passes of one capture have put weights."""

    _members: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict)
    within: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    copies: list[_Copy] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)

    def merged(self, parts: Sequence[Tensor], whole: Tensor) -> None:
        """``parts`` are the rows of ``whole``, in order."""
        members, begin = [], 0
        for part in parts:
            members.append((part, begin))
            self.within[id(part)] = weakref.ref(whole), begin
            begin += part.shape[0]
        self._members[id(whole)] = members

    def copied(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        make: Callable[[], Sequence[Tensor]],
        what: str,
    ) -> None:
        """``targets`` are the result of ``make()`` from ``sources``."""
        self.copies.append(_Copy(tuple(targets), tuple(sources), make, what))

    def packed(
        self,
        matrix: Tensor,
        parts: Sequence[Any],
        pack: Pack | None,
        what: str,
        order: Tensor | None,
    ) -> None:
        """``matrix`` is stored as ``parts``. Called before its memory is freed."""
        for part, begin in self._members.get(id(matrix), [(matrix, 0)]):
            self.held[id(part)] = Held(tuple(parts), pack, begin, len(matrix), order, what)


class WeightMap:
    """The places of a checkpoint's tensors in one rank's model.

    Args:
        module: has the parameters; for a restored start, only its tensors.
        record: of the passes. cuts: of a rank, by parameter.
        names: creates the names of the checkpoint, on first use.
    """

    def __init__(
        self,
        module: nn.Module,
        record: WeightRecord,
        cuts: Mapping[str, Cut],
        names: Callable[[], WeightNames],
    ) -> None:
        self._module, self._record, self._cuts = module, record, cuts
        self._make_names = names
        self._names: WeightNames | None = None

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors of the checkpoint, including those that the model does not
        read."""
        return self._known().names

    def locate(self, name: str) -> tuple[Place, ...]:
        """All places of a checkpoint's tensor on this rank.

        Raises:
            InvalidInputError: the checkpoint has no such tensor, the model does not read it, or its
                place is unknown.
        """
        tensors = self._tensors()
        places: list[Place] = []
        for region in self._regions(name):
            tensor, cut = tensors[region.parameter], self._cuts.get(region.parameter)
            held = self._record.held.get(id(tensor))
            if held is not None:
                _check_held(region.parameter, held)
                rows = (slice(held.begin, held.begin + len(tensor)),)
                transform = (*region.transform, held.what)
                places += [Place(part, rows, transform, cut) for part in held.parts]
            if not _is_live(tensor):
                continue
            for box in region.within(cut):
                places.append(self._place(box, tensor, cut))
                written = tensor.detach()[box.slices]
                places += [
                    Place(target, (slice(None),), (*region.transform, copy.what), cut)
                    for copy in self._copies_of([written])
                    for target in copy.targets
                ]
        return tuple(places)

    def write(self, name: str, value: Tensor) -> None:
        """:meth:`write_all` for one tensor."""
        self.write_all({name: value})

    def write_all(self, values: Mapping[str, Tensor]) -> None:
        """Write new values of the checkpoint's tensors in place. The model then equals a fresh load
        of the changed checkpoint, to the bit.

        Tensors of the same quantised layer, or of the same tied parameter, must be written in one
        call. The contents of the KV cache still come from the old weights. No step may run during
        the call.

        Args:
            values: by name, with the shape and the kind of dtype of the checkpoint. A float of
                another width is converted as in loading.

        Raises:
            InvalidInputError: a name, shape or dtype differs from the checkpoint's, or a place
                cannot be written. Then nothing is changed.
        """
        names, tensors = self._known(), self._tensors()
        held = {n: h for n, t in tensors.items() if (h := self._record.held.get(id(t)))}
        changes = names.changes(values, held)
        self._check_tied(values, tensors)
        edits: list[tuple[Tensor, Tensor]] = []
        done: set[tuple[object, ...]] = set()
        for region, value in changes.values:
            tensor = tensors[region.parameter]
            own = held.get(region.parameter)
            if own is not None and region.parameter not in changes.quantized:
                _check_held(region.parameter, own)
                raise refused(region.parameter, f"is held as {own.what}: its layer must be given")
            if not _is_live(tensor):
                continue
            for box in region.within(self._cuts.get(region.parameter)):
                key = id(tensor), box.begin, box.sizes
                if key not in done:
                    done.add(key)
                    edits.append((tensor.detach()[box.slices], box.part_of(value)))
        packed: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, weight in changes.quantized.items():
            if parameter in held:
                _pack(parameter, held[parameter], weight, packed)
        self._apply(edits + list(packed.values()), [view for view, _ in edits])

    def _apply(self, edits: Sequence[tuple[Tensor, Tensor]], written: Sequence[Tensor]) -> None:
        copies = self._copies_of(written)
        saved: list[tuple[Tensor, Tensor]] = []
        # A capture creates inference tensors, which can only be written in this mode.
        with torch.inference_mode():
            try:
                for target, value in edits:
                    saved.append((target, target.clone()))
                    target.copy_(value)
                _make_again(copies)
            except BaseException:
                for target, old in reversed(saved):
                    target.copy_(old)
                _make_again(copies)
                raise

    def _check_tied(self, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for tied in self._known().ties:
            given = [name for name in tied if name in values]
            if not given:
                continue
            shared = {id(tensors[r.parameter]) for name in tied for r in self._regions(name)}
            if len(shared) > 1:
                continue
            others = [name for name in tied if name not in values]
            if others or not all(torch.equal(values[given[0]], values[n]) for n in given[1:]):
                limit = f"is one parameter with {', '.join(n for n in tied if n != given[0])}"
                raise refused(given[0], f"{limit}: write equal values in one call")

    def _copies_of(self, views: Sequence[Tensor]) -> list[_Copy]:
        ranges = [_memory(view) for view in views]
        return [
            copy
            for copy in self._record.copies
            if any(_overlaps(_memory(source), r) for source in copy.sources for r in ranges)
        ]

    def _place(self, box: Region, tensor: Tensor, cut: Cut | None) -> Place:
        transform = (*box.transform, str(tensor.dtype).removeprefix("torch."))
        whole, begin = self._record.within.get(id(tensor), (None, 0))
        storage = None if whole is None else whole()
        if storage is None:
            return Place(tensor, box.slices, transform, cut)
        rows = slice(begin + box.begin[0], begin + box.begin[0] + box.sizes[0])
        return Place(storage, (rows, *box.slices[1:]), transform, cut)

    def _regions(self, name: str) -> Sequence[Region]:
        return self._known().regions(name)

    def _known(self) -> WeightNames:
        if self._names is None:
            self._names = self._make_names()
        return self._names

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        return found | dict(self._module.named_buffers(remove_duplicate=False))


def check_value(name: str, value: Tensor, expected: Tensor) -> None:
    """Raise InvalidInputError unless the shape is that of ``expected``, and the dtype is the same
    or both are floats of 16 or 32 bits."""
    if tuple(value.shape) != tuple(expected.shape):
        raise refused(name, f"has shape {tuple(value.shape)}, not {tuple(expected.shape)}")
    floats = (torch.float32, torch.float16, torch.bfloat16)
    is_float = value.dtype in floats and expected.dtype in floats
    if value.dtype != expected.dtype and not is_float:
        raise refused(name, f"is {value.dtype}, not {expected.dtype}")


def refused(name: str, limit: str) -> InvalidInputError:
    """The error for a tensor of the checkpoint, or a parameter, that cannot be found or written."""
    return InvalidInputError("weights", name, limit)


def _is_live(tensor: Tensor) -> bool:
    """Whether a parameter has its own values, and is not a stand-in for a quantised weight."""
    return not (is_stand_in(tensor) and tensor.numel() > 1)


def _check_held(parameter: str, held: Held) -> None:
    """Refuse a form that cannot be written in place."""
    if held.pack is None or not all(isinstance(part, Tensor) for part in held.parts):
        raise refused(parameter, f"is held as {held.what}, which cannot be written in place")


def _make_again(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        for target, value in zip(copy.targets, copy.make(), strict=True):
            target.copy_(value)


def _memory(tensor: Tensor) -> tuple[torch.device, int, int]:
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return tensor.device, begin, begin + (last + 1) * tensor.element_size()


def _overlaps(one: tuple[Any, int, int], other: tuple[Any, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _pack(
    parameter: str,
    held: Held,
    weight: QuantizedWeight,
    packed: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Write the parts of a matrix, with the rows of ``weight`` in it, into ``packed``."""
    if not is_same_order(weight.order, held.order):
        raise refused(parameter, "would have its inputs in another order than it is held in")
    _check_held(parameter, held)
    weight = weight.in_order()
    new = _parts_of(held, weight, lambda part: part)
    if len(weight.values) == held.num_rows:
        masks: list[Tensor | None] = [None] * len(new)
    else:
        # A packing moves bits and values. Two inputs that differ in all bits of the rows reveal
        # which bits belong to those rows.
        low = _parts_of(held, weight, torch.zeros_like)
        high = _parts_of(held, weight, _ones)
        masks = [_difference(*pair) for pair in zip(low, high, strict=True)]
    if len(new) != len(held.parts):
        raise refused(parameter, f"would be held in another form than {held.what}")
    for target, value, mask in zip(held.parts, new, masks, strict=True):
        if value.shape != target.shape or value.dtype != target.dtype:
            raise refused(parameter, f"would be held in another form than {held.what}")
        now = packed.get(id(target), (target, target))[1]
        packed[id(target)] = target, value if mask is None else _chosen(mask, value, now)


def _parts_of(
    held: Held, weight: QuantizedWeight, fill: Callable[[Tensor], Tensor]
) -> Sequence[Tensor]:
    """The parts that the kernel reads, for a matrix with these rows, and zeros elsewhere."""
    assert held.pack is not None  # checked before

    def whole(part: Tensor) -> Tensor:
        rows = part.new_zeros(held.num_rows, *part.shape[1:])
        rows[held.begin : held.begin + len(part)] = fill(part)
        return rows

    return held.pack(weight.mapped(whole))


def _ones(part: Tensor) -> Tensor:
    """Integers with all bits set; 1 for floats."""
    if part.is_floating_point():
        return torch.ones_like(part)
    return torch.full_like(part, 255 if part.dtype == torch.uint8 else -1)


def _difference(low: Tensor, high: Tensor) -> Tensor:
    if low.dtype.is_floating_point and low.element_size() > 1:
        return low != high
    return low.view(torch.uint8) ^ high.view(torch.uint8)


def _chosen(mask: Tensor, value: Tensor, now: Tensor) -> Tensor:
    """``value`` where the mask is set, else ``now``."""
    if mask.dtype == torch.bool:
        return torch.where(mask, value, now)
    bits = (value.view(torch.uint8) & mask) | (now.view(torch.uint8) & ~mask)
    return bits.view(now.dtype)


class ModuleNames:
    """Names of a module in memory: those of its parameters and saved buffers."""

    ties: Sequence[Sequence[str]] = ()

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def regions(self, name: str) -> Sequence[Region]:
        if name not in self._tensors:
            raise refused(name, "is no tensor of the model")
        return [Region.whole(name, self._tensors[name].shape)]

    def changes(self, values: Mapping[str, Tensor], held: Mapping[str, Any]) -> Changes:
        for name, value in values.items():
            self.regions(name)
            if name in held:
                raise refused(name, "is quantised, and the model is in memory")
            check_value(name, value, self._tensors[name])
        return Changes([(self.regions(name)[0], value) for name, value in values.items()], {})
