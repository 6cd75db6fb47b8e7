"""Fake results that are made like others are what running the call again would have recorded."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from pagespec.compile.capture.dynamo import trace
from pagespec.compile.capture.graph_json import decode, encode
from pagespec.compile.capture.graph_key import named_tensors
from pagespec.compile.capture.meta_json import ResultDecoder
from pagespec.compile.fx.fake_call_cache import Calls
from pagespec.compile.passes import COMMON_PASSES, PassContext, run_passes
from tests.compile.capture.test_graph_cache import description, probed

Function = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Callable[..., FakeTensor]]:
    """Makes fake tensors ``[s, 4, 6]``, or ``[s, *shape]``, in memory of their own."""
    rows = ResultDecoder([["s7", "L['x'].size()[0]", 5, 2, None]], {})

    def of(*shape: int, dtype: str = "float32") -> FakeTensor:
        sizes: list[Any] = ["s7", *(shape or (4, 6))]
        number = len(rows._tensors)
        return rows.value(["tensor", number, dtype, "cpu", sizes, None, 0, False])  # type: ignore[no-any-return]

    with torch.inference_mode(False), torch.no_grad(), enable_python_dispatcher():
        yield of


def described(given: list[Any], result: Any) -> list[Any]:
    """The layout of each tensor in ``result``, and what it shares with ``given`` and others."""
    numbers: dict[int, int] = {}
    found: list[Any] = [type(result)]
    for value in [*given, *tree_leaves(result)]:
        if not isinstance(value, Tensor):
            found.append((type(value), str(value)))
            continue
        memory = value.untyped_storage()
        found.append(
            (
                *(numbers.setdefault(key, len(numbers)) for key in (id(value), memory._cdata)),
                *(str(value.shape), str(value.stride()), str(value.storage_offset())),
                *(value.dtype, value.device, type(value), str(memory.nbytes())),
                str(torch._C._dispatch_keys(value)),
            )
        )
    return found


def second(function: Function, first: tuple[Any, ...], then: tuple[Any, ...]) -> Any:
    """The call on ``then``, if it is like that on ``first``, which is run."""
    calls = Calls()
    assert calls.like("call_function", function, first, {}) is None
    calls.keep(function(*first), "layout")
    return calls.like("call_function", function, then, {})


LIKE: dict[str, Function] = {
    "new": lambda x: x + 1,
    "view": lambda x: x.transpose(1, 2),
    "part": lambda x: x[:, 1:3],
    "parts": lambda x: x.split([2, 4], -1),
    "parts of something new": lambda x: (x + 1).chunk(2, dim=1),
    "itself": lambda x: x.contiguous(),
    "twice the same": lambda x: (lambda y: [y, y.unsqueeze(0), y])(x * 2),
    "as another dtype": lambda x: x.view(torch.int32),
    "size": lambda x: x.size(0) * 2,
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("name", LIKE)
def test_a_result_made_anew_is_what_running_gives(
    name: str, make: Callable[..., FakeTensor]
) -> None:
    function, x, y = LIKE[name], make(), make()
    call = second(function, (x,), (y,))
    assert call is not None
    assert call.layout == "layout"
    assert described([x, y], call.result()) == described([x, y], function(y))
    # Not even two of one call are one.
    pair = [call.result(), call.result()]
    assert described([x, y], pair) == described([x, y], [function(y), function(y)])


def _writes(x: Tensor) -> Tensor:
    return x.add_(1)


def _moves(x: Tensor) -> None:
    x.transpose_(1, 2)


def _depends_on_data(x: Tensor) -> Tensor:
    return x.nonzero()


def _has_named_parts(x: Tensor) -> Any:
    return x.sort()


@pytest.mark.parametrize("function", [_writes, _moves, _depends_on_data, _has_named_parts])
def test_what_does_more_than_its_result_says_is_run(
    function: Function, make: Callable[..., FakeTensor]
) -> None:
    assert second(function, (make(),), (make(),)) is None


def _first(*values: Any) -> Any:
    return values[0] + 1


def test_calls_differ_by_all_that_a_result_may_depend_on(
    make: Callable[..., FakeTensor],
) -> None:
    x, y = make(), make()
    first = (x, y, [1, slice(None, 2)])
    assert second(_first, first, (y, x, [1, slice(None, 2)])) is not None
    for then in (
        (make(4, 5), y, [1, slice(None, 2)]),
        (make(dtype="float16"), y, [1, slice(None, 2)]),
        (make(6, 4).transpose(1, 2), y, [1, slice(None, 2)]),
        (make(4, 7)[..., :6], y, [1, slice(None, 2)]),
        (x, x, [1, slice(None, 2)]),
        (x, x.view(x.shape), [1, slice(None, 2)]),
        (x, y, (1, slice(None, 2))),
        (x, y, [True, slice(None, 2)]),
        (x, y, [1.0, slice(None, 2)]),
        (x, y, [1, slice(None, 3)]),
        (x, y, [x.size(0), slice(None, 2)]),
        (x, y, [1, slice(None, 2)], object()),
    ):
        assert second(_first, first, then) is None


def test_a_part_behind_the_recorded_whole_makes_each_whole_grow() -> None:
    decoder = ResultDecoder([], {})
    with torch.inference_mode(False), torch.no_grad():
        wholes = []
        for base in (0, 2, 4):
            whole = decoder.value(["tensor", base, "float32", "cpu", [4], None, 0, False])
            part = decoder.value(["tensor", base, "float32", "cpu", [4], [1], 4, False])
            assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            wholes.append(whole)
    assert [whole.untyped_storage().nbytes() for whole in wholes] == [32, 32, 32]
    assert len({whole.untyped_storage()._cdata for whole in wholes}) == 3


def test_propagating_records_the_same_and_runs_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, specs = probed("qwen3", num_hidden_layers=4)
    names = {id(tensor): name for name, tensor in named_tensors(loaded.module)}
    data = json.loads(json.dumps(encode(trace(loaded, specs), names)))
    runs: list[Any] = []
    # The package has the function by the name of its module.
    module = importlib.import_module("pagespec.compile.passes.propagate")
    call = module._call

    def counted(node: Any, args: Any, kwargs: Any) -> Any:
        runs.append(node)
        return call(node, args, kwargs)

    monkeypatch.setattr(module, "_call", counted)
    found, num_runs = [], []
    for remembers in (True, False):
        if not remembers:
            monkeypatch.setattr(Calls, "like", lambda *_: None)
        runs.clear()
        traced = decode(data, dict(named_tensors(loaded.module)))
        context = PassContext(loaded.module, traced.constants)
        with torch.inference_mode():
            counts = run_passes(traced.gm, context, COMMON_PASSES)
        found.append((counts, description(traced.gm)))
        num_runs.append(len(runs))
    assert found[0] == found[1]
    assert found[0][0]["propagate"] > 0
    assert num_runs[0] * 2 < num_runs[1]
