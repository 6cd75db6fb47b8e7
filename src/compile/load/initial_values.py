"""``InitialValues``: the values that a model's own code gives to its parameters, drawn by slice.

``_init_weights`` runs on the meta device, and its calls are recorded. A random element is a
function of the name of its parameter and of its place in it:

::

    row key  = splitmix64(row + hash of the name), two odd multipliers of 32 bits
    element  = quantile[mix32(row key, column) >> 16]      one of 65,536 equally likely values

So any slice of a parameter is drawn alone, with the bits that it has in the whole parameter, on any
device and for any number of ranks. An element costs about ten integer operations.

Calls that compute with other tensors (time constants of recurrent layers) cannot be recorded. Their
modules are initialised again on the target device, whole and with a seed of their own. torch skips
some distributions on the meta device (``trunc_normal_``): matrices with no other values get a
standard deviation of 0.02.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ..model.loaded import named_tensors
from ..weights import Cut

Box = tuple[tuple[int, int], ...]
"""``(begin, end)`` per dimension of a parameter."""

_STD = 0.02  # of matrices that no code initialises
_NUM_QUANTILES = 1 << 16
# Elements per call: integers that stay in the cache of a core, or in the L2 cache of a GPU.
_NUM_PER_CALL = {"cpu": 1 << 16, "cuda": 1 << 22}
_SPLITMIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # as int64
_COLUMN, _MIX = -0x61C88647, 0x2C1B3C6D  # as int32


@dataclass(frozen=True, slots=True)
class _Step:
    """One recorded call.

    Attributes:
        args: the constant; mean and standard deviation; both ends of the interval; or a tensor.
        box: the part of the parameter that the call writes; None for all of it.
        shape: of the parameter. seed: of its name.
    """

    kind: Literal["constant", "normal", "uniform", "copy"]
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    seed: int
    box: Box | None = None


class KeptConstants(TorchFunctionMode):
    """While a skeleton is built, ``torch.tensor`` keeps its values, which the meta device loses.

    An empty tensor stays there: transformers finds the device of the context with it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.tensor and not (isinstance(args[0], list) and not args[0]):
            options["device"] = "cpu"
        return func(*args, **options)


class InitialValues:
    """The initial values of a module on the meta device.

    Args:
        module: whole, before it is sharded; best built with :class:`KeptConstants`.
        device: where :meth:`fill` writes.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self._device = device
        built = _move_to_meta(module)
        self._named = dict(named_tensors(module))
        first: dict[int, str] = {}
        for name, tensor in self._named.items():
            first.setdefault(_storage(tensor), name)
        self._first = {name: first[_storage(t)] for name, t in self._named.items()}
        self._steps: dict[str, list[_Step]] = {}
        self._quantiles: dict[tuple[Any, ...], Tensor] = {}
        self._recorder = _Recorder({first[_storage(t)]: t for t in self._named.values()})
        for name, value in built.items():
            self._add(self._first[name], self._recorder.step(self._first[name], "copy", value))
        with torch.no_grad():
            for owner, part in _in_order(module, module):
                self._record(owner, part)

    def fill(self, name: str, out: Tensor, cut: Cut | None) -> None:
        """Write a parameter or buffer, or the part of it that a cut selects, into ``out``.

        Raises:
            UnsupportedModelError: it is a buffer that the model's code does not initialise.
        """
        whole = self._named[name]
        steps = self._steps.get(self._first[name]) or [self._default(name, whole)]
        for part, box in _parts(out, tuple(whole.shape), cut):
            for step in steps:
                self._write(step, part, box)

    def _record(self, owner: PreTrainedModel, module: nn.Module) -> None:
        """The calls of ``owner._init_weights(module)``."""
        recorder = self._recorder
        recorder.begin()
        try:
            with recorder:
                owner._init_weights(module)
        except Exception:  # of any type: it reads elements, which meta tensors do not have
            recorder.is_followed = False
        if recorder.is_followed:
            for name, step in recorder.found:
                self._add(name, step)
            return
        own = [self._first_of(t) for t in _own_tensors(module).values()]
        written = recorder.written or set(own)
        for name, value in self._run(owner, module, {*own, *written}).items():
            if name in written:
                self._add(name, recorder.step(name, "copy", value))

    def _first_of(self, tensor: Tensor) -> str:
        return self._recorder.names[_storage(tensor)]

    def _add(self, name: str, step: _Step) -> None:
        if step.box is None:
            self._steps[name] = [step]
        else:
            self._steps.setdefault(name, []).append(step)

    def _run(self, owner: PreTrainedModel, module: nn.Module, names: set[str]) -> dict[str, Tensor]:
        """Call ``owner._init_weights(module)`` with real tensors; returns them by name."""
        real: dict[str, Tensor] = {}
        for name in names:
            whole = self._named[name]
            real[name] = torch.zeros(whole.shape, dtype=whole.dtype, device=self._device)
            if name in self._steps:
                self.fill(name, real[name], None)
        places = [
            (tensors, key, tensor)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and self._first_of(tensor) in names
        ]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(_seed(min(names, default="")))
            try:
                for tensors, key, tensor in places:
                    value: Any = real[self._first_of(tensor)]
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(value, False) if is_parameter else value
                owner._init_weights(module)
            finally:
                for tensors, key, tensor in places:
                    tensors[key] = tensor  # type: ignore[assignment]
        return real

    def _default(self, name: str, whole: Tensor) -> _Step:
        """For a parameter that no code initialises."""
        if not isinstance(whole, nn.Parameter):
            raise UnsupportedModelError(f"{name}: its model's code gives it no value")
        is_matrix = whole.dim() > 1 and whole.is_floating_point()
        kind, args = ("normal", (0.0, _STD)) if is_matrix else ("constant", (1,))
        return self._recorder.step(self._first[name], kind, *args)

    def _write(self, step: _Step, out: Tensor, box: Box) -> None:
        if step.box is not None:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, step.box, strict=True)]
            if any(begin >= end for begin, end in common):
                return
            out, box = out[_within(common, box)], tuple(common)
        if step.kind == "constant":
            out.fill_(step.args[0])
        elif step.kind == "copy":
            origin = step.box or tuple((0, size) for size in step.shape)
            out.copy_(step.args[0][_within(box, origin)])
        else:
            _draw(out, box, step, self._quantiles_of(step, out.dtype))

    def _quantiles_of(self, step: _Step, dtype: torch.dtype) -> Tensor:
        """The values of a distribution, ``[65,536]``, from its lowest."""
        key = step.kind, *step.args, dtype
        if key not in self._quantiles:
            ranks = (torch.arange(_NUM_QUANTILES, dtype=torch.float64) + 0.5) / _NUM_QUANTILES
            one, two = step.args
            values = one + two * torch.special.ndtri(ranks)
            if step.kind == "uniform":
                values = one + (two - one) * ranks
            self._quantiles[key] = values.to(dtype).to(self._device)
        return self._quantiles[key]


class _Recorder(TorchDispatchMode):
    """Records in-place calls on meta tensors.

    Args:
        tensors: by name; one per storage.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {_storage(tensor): name for name, tensor in tensors.items()}
        self._tensors = tensors
        self._seeds: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the calls so far."""
        self.found: list[tuple[str, _Step]] = []
        self.written: set[str] = set()
        self.is_followed = True

    def step(self, name: str, kind: Any, *args: Any, box: Box | None = None) -> _Step:
        if name not in self._seeds:
            self._seeds[name] = _seed(name)
        return _Step(kind, args, tuple(self._tensors[name].shape), self._seeds[name], box)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        of_meta = [a for a in args if isinstance(a, Tensor) and a.is_meta]
        if not of_meta:
            return result
        target = args[0]
        if func._schema.is_mutable:
            name = self.names.get(_storage(target)) if target.is_meta else None
            step = None if name is None else self._step_of(name, target, func, args, kwargs or {})
            if name is not None:
                self.written.add(name)
            if name is not None and step is not None:
                self.found.append((name, step))
            else:
                self.is_followed = False
        elif not isinstance(result, Tensor) or _storage(result) != _storage(of_meta[0]):
            self.is_followed = False  # neither a view nor a write
        return result

    def _step_of(
        self, name: str, target: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Step | None:
        """None for a call that a step cannot describe."""
        call = _CALLS.get(func)
        whole = self._tensors[name]
        is_all = target.shape == whole.shape and target.stride() == whole.stride()
        box = None if is_all else _box_of(target, whole)
        if call is None or kwargs.get("generator") or (box is None and not is_all):
            return None
        kind, defaults = call
        given = [*args[1:], *defaults[len(args) - 1 :]][: max(len(defaults), 1)]
        if kind == "copy" or (given and isinstance(given[0], Tensor)):
            if given[0].is_meta:
                return None
            value = given[0].detach().clone().expand(target.shape)
            sizes = whole.shape if box is None else [end - begin for begin, end in box]
            return self.step(name, "copy", value.reshape(tuple(sizes)), box=box)
        return self.step(name, kind, *given, box=box)


_ATEN = torch.ops.aten
_CALLS: dict[Any, tuple[str, tuple[float, ...]]] = {
    _ATEN.zero_.default: ("constant", (0,)),
    _ATEN.fill_.Scalar: ("constant", ()),
    _ATEN.fill_.Tensor: ("copy", ()),
    _ATEN.copy_.default: ("copy", ()),
    _ATEN.normal_.default: ("normal", (0.0, 1.0)),
    _ATEN.uniform_.default: ("uniform", (0.0, 1.0)),
}
"""The kind of step of a call, and the defaults of its arguments."""


def _in_order(
    owner: PreTrainedModel, module: nn.Module
) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """The modules in transformers' order of initialisation: children first, each with the model
    whose ``_init_weights`` initialises it."""
    for child in module.children():
        yield from _in_order(child if isinstance(child, PreTrainedModel) else owner, child)
    yield owner, module


def _move_to_meta(module: nn.Module) -> dict[str, Tensor]:
    """Replace tensors that a constructor made on another device. Returns them by name."""
    moved: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, tensor in _own_tensors(part).items():
            if not tensor.is_meta:
                moved[f"{prefix}.{name}" if prefix else name] = tensor.detach()
                tensors: Any = part._parameters if name in part._parameters else part._buffers
                on_meta: Any = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors[name] = nn.Parameter(on_meta) if is_parameter else on_meta
    return moved


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(named)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _box_of(view: Tensor, whole: Tensor) -> Box | None:
    """The part of a contiguous tensor that a view selects; None if it is no box."""
    if not whole.is_contiguous():
        return None
    offset, begins = view.storage_offset() - whole.storage_offset(), []
    for step in whole.stride():
        begins.append(offset // step)
        offset %= step
    left = {t: n for n, t in zip(view.shape, view.stride(), strict=True) if n > 1}
    sizes = [left.pop(step, 1) for step in whole.stride()]
    box = tuple((begin, begin + n) for begin, n in zip(begins, sizes, strict=True))
    is_inside = all(end <= size for (_, end), size in zip(box, whole.shape, strict=True))
    return box if is_inside and not left and not offset else None


def _parts(out: Tensor, shape: tuple[int, ...], cut: Cut | None) -> Iterator[tuple[Tensor, Box]]:
    """The views of ``out`` that are boxes of the whole tensor, with these boxes."""
    box = tuple((0, size) for size in shape)
    if cut is None:
        yield out, box
        return
    offset = 0
    for span in cut.spans:
        length = span[1] - span[0]
        part = out.narrow(cut.dim, offset, length)
        yield part, (*box[: cut.dim], span, *box[cut.dim + 1 :])
        offset += length


def _within(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    pairs = zip(box, outer, strict=True)
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in pairs)


def _draw(out: Tensor, box: Box, step: _Step, quantiles: Tensor) -> None:
    """Write the random elements of a box.

    Args:
        out: of the box's shape. quantiles: see :meth:`InitialValues._quantiles_of`.
    """
    first, last = box[-1] if box else (0, 1)
    columns = torch.arange(first, last, dtype=torch.int32, device=out.device).mul_(_COLUMN)
    num_rows = max(1, _NUM_PER_CALL.get(out.device.type, 1 << 16) // max(1, last - first))
    keys = _row_keys(box, step, out.device)
    for rows, begin in _matrices(out if out.dim() else out.view(1)):
        for i in range(0, len(rows), num_rows):
            part = rows[i : i + num_rows]
            one, two = (key[begin + i : begin + i + len(part), None] for key in keys)
            x = one + columns
            shifted = x >> 15
            x ^= shifted
            x *= two
            torch.bitwise_right_shift(x, 13, out=shifted)
            x ^= shifted
            x *= _MIX
            x >>= 16
            x += _NUM_QUANTILES // 2
            if part.is_contiguous():
                torch.index_select(quantiles, 0, x.view(-1), out=part.view(-1))
            else:
                part.copy_(quantiles.index_select(0, x.view(-1)).view(part.shape))


def _matrices(out: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views of ``out`` as matrices, with the number of rows before each."""
    if out.dim() <= 2 or out.is_contiguous():
        yield out.reshape(-1, out.shape[-1]), 0
        return
    num_rows = out[0].numel() // out.shape[-1]
    for i, part in enumerate(out):
        yield from ((rows, i * num_rows + begin) for rows, begin in _matrices(part))


def _row_keys(box: Box, step: _Step, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 per row of a box, ``[R]``: the offset and the odd factor of its columns."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for (begin, end), size in zip(box[:-1], step.shape[:-1], strict=True):
        place = place[..., None] * size + torch.arange(begin, end, device=device)
    one, two, three = _SPLITMIX
    x = (place.reshape(-1) * one).add_(step.seed)
    x = (x ^ (x >> 30)).mul_(two)
    x = (x ^ (x >> 27)).mul_(three)
    x ^= x >> 31
    low = (x << 32) >> 32
    return low.int(), (x >> 32).int() | 1
