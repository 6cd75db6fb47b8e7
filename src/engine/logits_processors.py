"""vLLM's classes that edit logits: the engine argument ``logits_processors``.

Each continuation has an object of each class, whose batch is this continuation alone. A request's
bits therefore do not depend on the batch, whatever the class computes. The objects are made with
the request, and called like the functions of ``SamplingParams.logits_processors``.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from ..errors import InvalidInputError
from ..params.checks import is_list
from .sampling_params import SamplingParams

RequestLogitsProcessor = Callable[..., Any]
"""A function of (output ids, row) or (prompt ids, output ids, row) that returns a row."""

_State = TypeVar("_State")


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch, in the order in which they happen.

    Attributes:
        batch_size: number of requests.
        removed: indices.
        added: (index, sampling parameters, prompt ids, output ids). The list of output ids grows.
        moved: (index, index, direction).
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Edits the logits of a batch. Here a batch has one request, with index 0.

    Args (of subclasses):
        vllm_config: the settings of the engine, to read.
        device: where the logits are: the CPU.
        is_pin_memory: False.
    """

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError if ``extra_args`` of a request is refused."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """The logits to sample from, float32 ``[1, V]``; ``logits`` may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether :meth:`apply` keeps the largest logit the largest. vLLM applies such a class
        after the temperature; here it is refused."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before :meth:`apply`, at the first token with the request as added, and with None
        afterwards."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Edits each request by a function of its own.

    Attributes:
        req_info: by index of a request, its function of a row.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: ARG002
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a new request; None: it is not edited."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new)

    def _new(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Any], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, *([prompt_ids] if takes_prompt else []), output_ids)

    def apply(self, logits: Any) -> Any:
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits


def process_dict_updates(
    req_entries: dict[int, _State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], _State | None],
) -> bool:
    """Apply changes of a batch to a dict of states by index.

    Args:
        new_state: the state of an added request; None: it has none.

    Returns:
        Whether the dict was changed.
    """
    before = {index: id(state) for index, state in req_entries.items()}
    if batch_update is None:
        return False
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        _put(req_entries, index, new_state(params, prompt_ids, output_ids))
    for begin, end, direction in batch_update.moved:
        moved, replaced = req_entries.pop(begin, None), req_entries.pop(end, None)
        _put(req_entries, end, moved)
        if direction is MoveDirectionality.SWAP:
            _put(req_entries, begin, replaced)
    return before != {index: id(state) for index, state in req_entries.items()}


def _put(entries: dict[int, _State], index: int, state: _State | None) -> None:
    if state is None:
        entries.pop(index, None)
    else:
        entries[index] = state


class _OfRequest:
    """A processor as a function of (output ids, row). Its batch is one request."""

    def __init__(self, processor: LogitsProcessor, output_ids: list[int]) -> None:
        self._processor, self._output_ids = processor, output_ids
        self._is_first = True

    def __call__(self, output_ids: list[int], row: Any) -> Any:
        self._output_ids[:] = output_ids
        if not self._is_first:
            self._processor.update_state(None)
        self._is_first = False
        return self._processor.apply(row[None])[0]

    def __repr__(self) -> str:
        return type(self._processor).__name__


@dataclass(frozen=True)
class ProcessorClasses:
    """The classes of an engine.

    Args:
        classes: subclasses of :class:`LogitsProcessor`.
        vllm_config, device: their first arguments.

    Raises:
        InvalidInputError: a class is argmax-invariant.
    """

    classes: tuple[type[LogitsProcessor], ...]
    vllm_config: Any
    device: Any

    def __post_init__(self) -> None:
        for one in self.classes:
            if self._make(one).is_argmax_invariant():
                limit = "must not be argmax-invariant: classes run before the temperature"
                raise InvalidInputError("logits_processors", one.__name__, limit)

    def _make(self, one: type[LogitsProcessor]) -> LogitsProcessor:
        return one(self.vllm_config, self.device, False)

    def of(self, params: SamplingParams, prompt_ids: Sequence[int]) -> tuple[_OfRequest, ...]:
        """The functions of a new continuation.

        Raises:
            InvalidInputError: a class refuses the parameters.
        """
        found = []
        for one in self.classes:
            try:
                one.validate_params(params)
            except ValueError as error:
                limit = f"is refused by {one.__name__}: {error}"
                raise InvalidInputError("extra_args", params.extra_args, limit) from error
            processor, output_ids = self._make(one), list[int]()
            added = (0, params, list(prompt_ids), output_ids)
            processor.update_state(BatchUpdate(1, (), (added,), ()))
            if not isinstance(processor, AdapterLogitsProcessor) or processor.req_info:
                found.append(_OfRequest(processor, output_ids))
        return tuple(found)


def processor_classes(name: str, value: Any) -> tuple[type[LogitsProcessor], ...]:
    """Check the argument: classes, or their names ``"module:Class"``; a text is one name.

    Raises:
        InvalidInputError: names the value and the limit.
    """
    if isinstance(value, str):
        value = (value,)
    if not is_list(value):
        raise InvalidInputError(name, value, "must be a list of classes or of module:Class")
    return tuple(_class_of(name, one) for one in value)


def _class_of(name: str, value: Any) -> type[LogitsProcessor]:
    found = value
    if isinstance(value, str):
        module, _, path = value.partition(":")
        try:
            found = importlib.import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidInputError(name, value, f"cannot be imported: {error}") from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        limit = "must be a subclass of LogitsProcessor; functions: SamplingParams.logits_processors"
        raise InvalidInputError(name, value, limit)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise InvalidInputError(name, value, f"must define {missing}")
    return found
