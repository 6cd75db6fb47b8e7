"""Memoises calls on fake tensors: the result of an equal call before is copied, not computed.

Two calls are alike if they call one function with equal arguments, on tensors that lie alike in
memory and share memory alike. The result of the second is then as the first's, in the memory of its
own arguments or in new memory, and never the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

from .fake_tensors import Layout, expressions, layout_key, memory_of
from .nodes import PLAIN

_PLAIN = (*PLAIN, complex, type(...), torch.dtype, torch.device)
_PLAIN_OF_TORCH = (torch.layout, torch.memory_format)
_Maker = Callable[[list[FakeTensor], dict[int, FakeTensor]], Any]


class _Unknown(Exception):
    """Raised for what no second call is made like."""


@dataclass(frozen=True, slots=True)
class LikeCall:
    """A call like one before.

    Attributes:
        layout: what was kept of the first call's result.
    """

    layout: Any
    _make: _Maker
    _tensors: list[FakeTensor]

    def result(self) -> Any:
        """The result, made anew."""
        return self._make(self._tensors, {})


class Calls:
    """The calls of one graph: those that were run, by what they were called with."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, _Maker] | None] = {}
        self._current: tuple[Hashable, _Arguments] | None = None

    def like(self, op: str, target: Any, args: Any, kwargs: Any) -> LikeCall | None:
        """An equal call before this one; None if it has to be run, and then :meth:`keep` told."""
        arguments = _Arguments()
        self._current = None
        try:
            key = (op, target, arguments.of(args), arguments.of(kwargs), arguments.layouts())
        except _Unknown:
            return None
        known = self._known.get(key)
        if known is not None:
            return LikeCall(*known, arguments.tensors)
        if key not in self._known:
            self._current = key, arguments
        return None

    def keep(self, result: Any, layout: Any) -> None:
        """Keep the result of the call asked for last, with ``layout`` for later ones like it."""
        if self._current is None:
            return
        key, arguments = self._current
        self._known[key] = None
        try:
            # Nothing that writes to its arguments: what it does is more than its result.
            if arguments.are_as_before():
                self._known[key] = layout, _Results(arguments).maker(result)
        except _Unknown:
            pass


class _Arguments:
    """The arguments of a call as a key, and the fake tensors in them, each once."""

    def __init__(self) -> None:
        self.tensors: list[FakeTensor] = []
        self.numbers: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self._before: tuple[Any, Any] = ((), ())

    def of(self, value: Any) -> Hashable:
        """Equal for equal arguments.

        Raises:
            _Unknown: of arguments other than tensors, sizes and plain data.
        """
        if type(value) is FakeTensor:
            number = self.numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                self.storages.setdefault(memory_of(value), number)
            return ("tensor", number)
        if type(value) is torch.SymInt:
            return ("size", value.node.expr)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self.of, value))
        if isinstance(value, dict):
            return ("dict", *((name, self.of(part)) for name, part in value.items()))
        if type(value) is slice:
            return ("slice", *map(self.of, (value.start, value.stop, value.step)))
        if type(value) in _PLAIN or isinstance(value, _PLAIN_OF_TORCH):
            # True equals 1.
            return (type(value), value)
        raise _Unknown

    def layouts(self) -> Hashable:
        """How the tensors lie in memory, and which share it."""
        layouts = tuple(map(self._layout, self.tensors))
        self._before = layouts, [tensor._version for tensor in self.tensors]
        return layouts

    def are_as_before(self) -> bool:
        """Are the tensors what they were when :meth:`layouts` was asked for?"""
        return self._before == (
            tuple(map(self._layout, self.tensors)),
            [tensor._version for tensor in self.tensors],
        )

    def _layout(self, fake: FakeTensor) -> Hashable:
        _check(fake)
        return (
            *(*layout_key(fake), id(fake.fake_mode)),
            *(isinstance(fake, torch.nn.Parameter), self.storages.get(memory_of(fake))),
            expressions((fake.untyped_storage().nbytes(),)),
        )


class _Results:
    """How the result of a call is made from other arguments."""

    def __init__(self, arguments: _Arguments) -> None:
        self._arguments = arguments
        self._made: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        given = arguments.tensors
        sizes = [s for t in given for s in (*t.shape, *t.stride(), t.storage_offset())]
        self._symbols = {s for e in expressions(sizes) for s in getattr(e, "free_symbols", ())}

    def maker(self, value: Any) -> _Maker:
        """A function of the arguments' tensors, and of what it made so far by number.

        Raises:
            _Unknown: of results other than tensors, sizes and plain data, or with sizes that the
                arguments do not show.
        """
        if type(value) is FakeTensor:
            return self._tensor(value)
        if type(value) in (tuple, list):
            kind, makers = type(value), [self.maker(part) for part in value]
            return lambda given, made: kind(make(given, made) for make in makers)
        if type(value) in (torch.SymInt, torch.Size):
            self._check_sizes(value if isinstance(value, torch.Size) else (value,))
        elif type(value) not in _PLAIN:
            raise _Unknown
        return lambda _given, _made: value

    def _tensor(self, fake: FakeTensor) -> _Maker:
        number = self._arguments.numbers.get(id(fake))
        if number is not None:
            return lambda given, _made: given[number]
        if id(fake) in self._made:
            before = self._made[id(fake)]
            return lambda _given, made: made[before]
        _check(fake)
        layout, place = Layout.of(fake), len(self._made)
        self._check_sizes((*layout.sizes, *layout.steps, layout.offset, layout.num_bytes))
        self._made[id(fake)] = place
        memory = memory_of(fake)
        owner = self._arguments.storages.get(memory)
        first = self._storages.setdefault(memory, place)

        def make(given: list[FakeTensor], made: dict[int, FakeTensor]) -> FakeTensor:
            if owner is not None:
                made[place] = layout.within(given[owner])
            elif first != place:
                made[place] = layout.within(made[first])
            else:
                made[place] = layout.new()
            return made[place]

        return make

    def _check_sizes(self, sizes: Iterable[Any]) -> None:
        for expression in expressions(sizes):
            # A size that depends on data is another one for each call.
            if not getattr(expression, "free_symbols", set()) <= self._symbols:
                raise _Unknown


def _check(fake: FakeTensor) -> None:
    """Raises _Unknown for what a layout does not describe."""
    if fake.layout != torch.strided or fake.is_conj() or fake.is_neg() or fake.is_inference():
        raise _Unknown
    # The value of a small constant, which a call may read.
    if fake.constant is not None:
        raise _Unknown
