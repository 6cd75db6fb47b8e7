"""Find the attention calls, recurrences and indexers of a model, by running it with stand-ins for
them.

The passes use no KV cache and no graph. On eight tokens, with the whole model:

1. *record*: every attention call in order, its shapes, scale, softcap, sinks, the window or chunk
   (derived from the mask closure that reaches exactly this call), and the slopes of a bias; every
   recurrence in order; and which indexer selected the positions of a call (:mod:`.call_recorder`);
2. *poison*: with attention, recurrences and indexers that mix no tokens, NaN in one token's
   embedding must reach no other token's logits. So nothing else mixes tokens: no recurrence or
   convolution except the known ones (:mod:`..model.recurrent`), no token shift, no attention that
   bypasses the interface. NaN shows however small the weights are;
3. *permute*: the packed tokens in another order must give the same queries, keys, values and
   logits in that order, so explicit position ids are used;
4. *cache*: only if modules make several calls: transformers' cache must keep the keys of each.

Then the probe uses as many tokens, and positions as far, as needed to pass the integers of the
config at which a model could begin to behave differently (:mod:`.reach_probe`).

Each refusal names the architecture and the reason: a wrong assumption here would silently give
wrong tokens later.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...errors import InvalidInputError, UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from ..model.attention import attention_implementation
from ..model.current_step import Scope
from ..model.linear_weights import expanded_linears
from ..model.loaded import LoadedModel
from ..weights import is_stand_in
from .call_recorder import CallRecorder
from .probe_pass import ProbePass, all_same
from .reach_probe import check_reach
from .thresholds import ReachPlan

_REFUSED_ROPE_TYPES = ("dynamic", "longrope")


def probe_model(loaded: LoadedModel) -> list[AttentionSpec]:
    """Find the spec of each attention call of the model, or refuse the model.

    Sets ``pagespec_call``, the call's number, on each attention module; ``pagespec_calls``, the
    numbers of all its calls, on modules that make several per pass; ``pagespec_index_call``, the
    number of the call that it selects for, on each indexer; and ``loaded.recurrent``. Changes
    nothing else.

    Returns:
        One spec per attention call, in order of execution.

    Raises:
        UnsupportedModelError: the kernels would not compute something exactly.
        InvalidInputError: a weight contains NaN or infinity.
    """
    return probe_with_reach(loaded)[0]


def probe_with_reach(loaded: LoadedModel) -> tuple[list[AttentionSpec], ReachPlan]:
    """:func:`probe_model`, and the lengths and positions that it tested."""
    _check_statically(loaded)
    with expanded_linears(loaded):
        return _probe(loaded)


def _probe(loaded: LoadedModel) -> tuple[list[AttentionSpec], ReachPlan]:
    probe_pass = ProbePass(loaded)
    ids = probe_pass.base[0]
    with torch.inference_mode():
        recorder = _record(probe_pass, ids)
        _check_calls(loaded, recorder)
        loaded.recurrent[:] = recorder.recurrent.specs.values()
        _check_token_independence(probe_pass)
        if len(recorder.calls()) < len(recorder.specs):
            _check_kept_keys(recorder, probe_pass, ids)
        for attention_module, specs in recorder.calls().items():
            attention_module.pagespec_call = specs[0].call  # type: ignore[assignment]
            if len(specs) > 1:
                numbers = tuple(spec.call for spec in specs)
                attention_module.pagespec_calls = numbers  # type: ignore[assignment]

        for indexer, number in recorder.indexers.modules.items():
            indexer.pagespec_index_call = number  # type: ignore[assignment]

        def check_calls_again(ids: Tensor) -> None:
            of_calls = recorder.calls()
            again = _record(probe_pass, ids, f": with {len(ids)} tokens in a pass")
            recorder.recurrent.check_again(again.recurrent)
            for module, specs in again.calls().items():
                if len(specs) != len(of_calls[module]):
                    raise again.refuse(f"it calls {type(module).__name__} {len(specs)} times")
                for spec, expected in zip(specs, of_calls[module], strict=True):
                    for field, before in asdict(replace(expected, call=spec.call)).items():
                        now = getattr(spec, field)
                        if now != before:
                            raise again.refuse(f"its attention has {field} = {now}, not {before}")

        reach = check_reach(probe_pass, recorder.specs, check_calls_again)
    return recorder.specs, reach


def _record(probe_pass: ProbePass, ids: Tensor, where: str = "") -> CallRecorder:
    """The calls of a pass of tokens at consecutive positions, in order."""
    recorder = CallRecorder(probe_pass.loaded.architecture + where, len(ids))
    rows = torch.tensor([1, len(ids) - 1, 1], device=ids.device)
    module = probe_pass.loaded.module
    with (
        attention_implementation(module, recorder.functions),
        recorder.recurrent.watching(module),
    ):
        probe_pass.logits(ids, torch.arange(len(ids), device=ids.device), rows)
    return recorder


def _check_statically(loaded: LoadedModel) -> None:
    module, config, name = loaded.module, loaded.config, loaded.architecture
    parameters = inspect.signature(module.forward).parameters
    if "input_ids" not in parameters:
        raise UnsupportedModelError(f"{name}: its forward takes no input_ids")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: it is an encoder-decoder model")
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters_of_type in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        rope_type = parameters_of_type.get("rope_type")
        if rope_type in _REFUSED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"{name}: rope type {rope_type!r} depends on the longest position of the batch"
            )


def _check_calls(loaded: LoadedModel, recorder: CallRecorder) -> None:
    expected = loaded.config.get_text_config(decoder=True).num_hidden_layers
    # The number of layers, or of calls if a few modules run repeatedly. With recurrences, a layer
    # may have one, attention, both or neither; a later pass verifies that nothing else mixes
    # tokens.
    is_known = expected in (len(recorder.specs), len(recorder.calls()))
    if not is_known and not recorder.recurrent.specs:
        raise recorder.refuse(
            f"{len(recorder.specs)} attention calls through AttentionInterface in {expected} layers"
        )
    # Some configs give the cache a window that the masks do not have. Then decode steps of
    # `generate` do not see all tokens that its first step saw.
    cache = DynamicCache(config=loaded.config.get_text_config(decoder=True))
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    for layer, spec in zip(layers, recorder.specs, strict=False):
        held = getattr(layer, "sliding_window", None)
        shown = spec.window or spec.chunk
        # A cache that holds the longest context drops nothing.
        if isinstance(held, int) and held != shown and held < loaded.max_position_embeddings:
            raise recorder.refuse(
                f"its cache holds {held} tokens of a layer, and its mask shows "
                f"{shown or 'all of them'}"
            )


def _check_kept_keys(recorder: CallRecorder, probe_pass: ProbePass, ids: Tensor) -> None:
    """Run 4. If a call's keys are not kept, the decode steps of `generate` see those of another
    call, but a pass over the whole text does not."""
    with probe_pass.stand_in():
        kept = probe_pass.num_kept(ids)
    if kept is not None and kept < recorder.num_keys:
        raise recorder.refuse(
            f"its cache keeps the keys of {kept} of its {recorder.num_keys} attention calls"
        )


def _check_token_independence(probe_pass: ProbePass) -> None:
    """Runs 2 and 3 of the module's description, and the plain run."""
    loaded = probe_pass.loaded
    ids, positions = probe_pass.base
    poisoned = len(ids) // 2 - 1

    def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, poisoned] = float("nan")
        return output

    with probe_pass.stand_in():
        plain = probe_pass.results(ids, positions)
        if not all(bool(x.isfinite().all()) for x in plain):
            _check_weights(loaded)
            raise probe_pass.refuse("its logits are not finite, though its weights are")
        with Scope() as scope:
            scope.hook(loaded.module.get_input_embeddings(), after=poison)
            reached = probe_pass.results(ids, positions)[0].isnan().any(-1)
        if not bool(reached[poisoned]) or int(reached.sum()) != 1:
            raise probe_pass.refuse("tokens mix outside attention")
        order = torch.tensor([5, 0, 7, 2, 6, 1, 4, 3], device=ids.device)
        permuted = probe_pass.results(ids[order], positions[order])
        if not all_same(permuted, [x[order] for x in plain]):
            raise probe_pass.refuse("position_ids are not followed")


def _check_weights(loaded: LoadedModel) -> None:
    """Raise an error that names the first weight with NaN or infinity. Weights are only checked if
    a result is not finite: reading all weights takes as long as a pass."""
    for name, weight in loaded.module.named_parameters():
        if is_stand_in(weight):  # its quantised weight was checked when it was read
            continue
        num_bad = weight.numel() - int(weight.isfinite().sum())
        if num_bad:
            raise InvalidInputError(
                "model",
                loaded.architecture,
                f"must have finite weights; {num_bad} of {weight.numel()} elements of {name!r} are "
                "NaN or infinite",
            )
