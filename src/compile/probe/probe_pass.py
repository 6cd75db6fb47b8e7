"""Forward passes of an unmodified model with stand-in attention: no KV cache, no mask, no graph.

The stand-in mixes no tokens, so a pass of thousands of tokens costs only its matmuls. Whatever
still reaches another token does so outside attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import PagespecError, UnsupportedModelError
from ..model.attention import attention_implementation
from ..model.current_step import Functions, IndexCall, RecurrentCall
from ..model.forward import PackedForward
from ..model.loaded import LoadedModel
from ..model.local_calls import local_attention, local_recurrence, no_choice, per_token

_NUM_TOKENS = 8


class ProbePass:
    """Runs a model on packed tokens.

    Attributes:
        base: ids and positions ``[8]`` of a short pass: two packed rows that start at different
            positions.

    Raises:
        UnsupportedModelError: the context is shorter than a row.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._forward = PackedForward(loaded.module)
        self._seen: list[Tensor] = []
        half, limit = _NUM_TOKENS // 2, loaded.max_position_embeddings
        if limit < half:
            raise self.refuse(f"max_position_embeddings = {limit}, must be at least {half}")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, loaded.vocab_size, (_NUM_TOKENS,), generator=generator)
        positions = torch.cat([torch.arange(half), torch.arange(half) + min(5, limit - half)])
        self.base = ids.to(loaded.device), positions.to(loaded.device)

    def refuse(self, reason: str) -> UnsupportedModelError:
        """The error that names the architecture and the reason."""
        return UnsupportedModelError(f"{self.loaded.architecture}: {reason}")

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """``[len(rows), V]``, computed with the functions of the thread."""
        with self._failures_named(ids):
            logits = self._forward(ids.unsqueeze(0), positions.unsqueeze(0), rows)
        if logits.dim() != 3 or logits.shape[:2] != (1, len(rows)):
            raise self.refuse(f"logits of shape {tuple(logits.shape)}")
        result: Tensor = logits[0]
        return result

    def num_kept(self, ids: Tensor) -> int | None:
        """The attention calls whose keys transformers' cache contains after a pass, if there is a
        cache."""
        with self._failures_named(ids):
            return self._forward.num_kept(ids.unsqueeze(0))

    @contextmanager
    def _failures_named(self, ids: Tensor) -> Iterator[None]:
        try:
            yield
        except (PagespecError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self.refuse(
                f"its forward pass fails on {len(ids)} packed tokens "
                f"({type(error).__name__}: {error})"
            ) from error

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Within the context, attention is :func:`local_attention`, a recurrence is
        :func:`local_recurrence`, an indexer selects nothing, and :meth:`results` can be called."""
        functions = Functions(self._attention, self._recurrence, self._choose)
        with attention_implementation(self.loaded.module, functions):
            yield

    def results(self, ids: Tensor, positions: Tensor) -> list[Tensor]:
        """The logits; queries, keys and values of every attention call; and the tensors per token
        of every recurrence and indexer. Dim 0 is the token."""
        self._seen.clear()
        logits = self.logits(ids, positions, torch.arange(len(ids), device=ids.device))
        return [logits, *self._seen]

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        num_tokens, num_keys = query.shape[2], key.shape[2]
        if num_keys != num_tokens or value.shape[2] != num_tokens:
            raise self.refuse(
                f"its attention is handed {num_keys} keys for the {num_tokens} tokens of a pass"
            )
        self._seen.extend(x[0].transpose(0, 1).clone() for x in (query, key, value))
        return local_attention(module, query, key, value)

    def _recurrence(self, call: RecurrentCall) -> Tensor:
        self._seen.extend(x.clone() for x in per_token(call))
        return local_recurrence(call)

    def _choose(self, module: nn.Module, call: IndexCall) -> Tensor:
        self._seen.extend(x.clone() for x in (call.query, call.key, call.weights))
        return no_choice(module, call)


def all_same(results: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether these results, of the same tokens, are equal up to rounding."""
    return len(results) == len(expected) and all(
        a.shape == b.shape and _same(a, b) for a, b in zip(results, expected, strict=True)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal up to rounding, relative to the largest element; loosely for half
    precision."""
    if not bool(a.isfinite().all()):
        return False
    bound = 1e-4 if a.dtype == torch.float32 else 2e-2
    return float((a - b).abs().max()) <= bound * float(b.abs().max())
