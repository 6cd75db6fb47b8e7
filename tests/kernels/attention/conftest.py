"""Give the matmuls of Triton's interpreter the summation order of a GPU."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """``a @ b + d``, where each element is one sum in order along K, as on a GPU.

    The interpreter's own matmul calls BLAS, whose order of summation differs between the rows of a
    tile.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from tests.support.interpreter import numbers

    def dot(_: object, a: Any, b: Any, d: Any, *__: object) -> TensorHandle:
        products = numbers(a)[:, :, None] * numbers(b)[None]
        return TensorHandle(products.sum(axis=1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
