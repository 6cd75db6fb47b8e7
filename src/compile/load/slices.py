"""Build a module on the meta device, shard it there, and give memory only to this rank's slices.

::

    skeleton on meta ──► regions of the checkpoint's tensors (weight_names)
         │               initial values (initial_values)
         └──► shard_model ──► for each storage that is left: empty ──► read or draw the slice

The same steps serve weights that are read and weights that are drawn, so no process ever has more
than its slices, and the piece that it is writing. Tensors of a checkpoint are views of its mapped
files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from ...errors import InvalidInputError
from ..model.loaded import Shard
from ..weights import Cut, Region
from .build_module import raise_incomplete, skeleton_of
from .checkpoint import NUM_READERS, Checkpoint, files_of
from .initial_values import InitialValues, KeptConstants
from .quantized_load import LayerQuantizer, quantization_of
from .tensor_parallel import ShardedHead, shard_model
from .weight_names import CheckpointRegions, Group

Make = Callable[[str, Tensor, "Cut | None"], Tensor]
"""Makes a parameter or buffer, by its name, or the part of it that a cut selects, from a tensor of
its shape and dtype on the meta device."""


def build_slices(
    source: str | None,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    *,
    keeps_head: bool = False,
    is_fp8: bool = False,
) -> tuple[PreTrainedModel, dict[str, Cut], ShardedHead, LayerQuantizer | None]:
    """A rank's module of ``config`` on ``device``.

    Args:
        source: a folder or hub id with safetensors files; None for random weights, whose bits are
            those of the whole model's.
        name: the model's name, for refusals.
        keeps_head: whether the rank also keeps the whole head.
        is_fp8: whether linear layers are quantised to FP8, each before the next one has values.

    Returns:
        The module; this rank's part of each parameter that is cut; its head; and the quantised
        weights, if ``is_fp8``.

    Raises:
        InvalidInputError: weights are missing, have other shapes, or cannot be read by slice.
        Exception: of any type, if a file is damaged.
    """
    if source is not None and quantization_of(config) is not None:
        limit = "weights that transformers expands as it loads them are for one process"
        raise InvalidInputError("tensor_parallel_size", shard.num_ranks, limit)
    with KeptConstants():
        module = skeleton_of(config, dtype=dtype)
    if source is None:
        make: Make = partial(_drawn, InitialValues(module, device), device)
    else:
        folder = files_of(source, allow_patterns=["*.json", "*.safetensors"])
        make = read_slices(module, name, Checkpoint(folder), dtype, device)
        if (folder / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(folder)
    quantize = LayerQuantizer(module, device) if is_fp8 else None
    # Readers wait for the disk. Random numbers on a GPU wait for nothing, and need memory there.
    is_parallel = quantize is None and (source is not None or device.type == "cpu")
    num_threads = NUM_READERS if is_parallel else 1
    cuts, head = materialize(
        module, shard, make, num_threads, keeps_head=keeps_head, quantize=quantize
    )
    return module, cuts, head, quantize


def read_slices(
    module: PreTrainedModel,
    name: str,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> Make:
    """Reads the values of a module on the meta device from a checkpoint. On a CPU, parameters that
    are tensors of the checkpoint, whole and in its dtype, stay in the memory of the file.

    Args:
        module: whole. Tied parameters with different values in the checkpoint are separated, and
            the dtypes of parameters become those that transformers would load.
        device: of the values.

    Raises:
        InvalidInputError: weights are missing, or have other shapes.
    """
    model, regions = name, CheckpointRegions(checkpoint, module)
    _separate(module, regions, checkpoint)
    _set_dtypes(module, dtype)
    by_parameter: dict[str, list[tuple[str, Region]]] = {}
    for name, found in regions.table.items():
        for region in found if isinstance(found, list) else ():
            by_parameter.setdefault(region.parameter, []).append((name, region))
    for parameter, filled in by_parameter.items():
        num_filled = sum(prod(region.sizes) for _, region in filled)
        if num_filled < module.get_parameter_or_buffer(parameter).numel():
            regions.mismatched.append(parameter)
    saved = set(module.state_dict())
    made = {name: group for name, group in regions.not_followed.items() if name in saved}
    _check_complete(model, module, regions, saved - {*by_parameter, *made})
    converted = _Converted(model, module, checkpoint) if made else None
    initial = InitialValues(module, device)

    def mapped(name: str, like: Tensor) -> Tensor | None:
        [(source, region), *others] = by_parameter[name]
        value = checkpoint.get(source)
        is_same = value.shape == like.shape and value.dtype == like.dtype and not others
        is_in_place = is_same and not region.transform and value.is_contiguous()
        return value if is_in_place and device.type == "cpu" else None

    def make(name: str, like: Tensor, cut: Cut | None) -> Tensor:
        if name not in by_parameter and name not in made:
            return _drawn(initial, device, name, like, cut)
        if cut is None and name in by_parameter:
            found = mapped(name, like)
            if found is not None:
                return found
        out = torch.empty(like.shape, dtype=like.dtype, device=device)
        if name in by_parameter:
            for source, region in by_parameter[name]:
                for part in region.within(cut):
                    out[part.slices].copy_(part.part_of(checkpoint.get(source)))
        elif converted is not None:
            whole = converted.get(name, made[name])
            for part in Region.whole(name, whole.shape).within(cut):
                out[part.slices].copy_(part.part_of(whole))
        return out

    return make


def _drawn(
    values: InitialValues, device: torch.device, name: str, like: Tensor, cut: Cut | None
) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=device)
    values.fill(name, out, cut)
    return out


def materialize(
    module: PreTrainedModel,
    shard: Shard,
    make: Make,
    num_threads: int,
    *,
    keeps_head: bool = False,
    quantize: LayerQuantizer | None = None,
) -> tuple[dict[str, Cut], ShardedHead]:
    """Shard a module on the meta device, and then give it memory and values, one storage after the
    other.

    Args:
        num_threads: storages that get values at the same time.
        keeps_head: see :func:`.shard_model`.
        quantize: takes the weights of linear layers as soon as they have values.

    Returns:
        The parts of the parameters that are cut, and the head.
    """
    cuts: dict[str, Cut] = {}
    head = ShardedHead(None, None)
    if shard.num_ranks > 1:
        head = shard_model(module, shard, cuts, keeps_head=keeps_head)
    parts = [(prefix, part, cuts) for prefix, part in module.named_modules()]
    if head.whole is not None:
        own = module.get_output_embeddings()
        parts += [(prefix, head.whole, {}) for prefix, part, _ in parts if part is own]
    storages: dict[int, list[_Place]] = {}
    for prefix, part, cut_of in parts:
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    place = _Place(name, cut_of.get(name), tensors, key, tensor)
                    storages.setdefault(int(tensor.untyped_storage()._cdata), []).append(place)

    def replace(places: list[_Place]) -> None:
        # The others are tied to it, or a part of it, as a head that is tied to the embedding.
        name, cut, _, _, largest = max(places, key=lambda place: place.tensor.numel())
        value = make(name, largest, cut)
        if quantize is not None:
            value = quantize(name, value)
        made: dict[int, Tensor] = {}
        for place in places:
            given = place.tensor
            if id(given) not in made:
                own = value
                if given.shape != largest.shape:
                    offset = value.storage_offset() + given.storage_offset()
                    own = value.as_strided(given.shape, given.stride(), offset)
                is_parameter = isinstance(given, nn.Parameter)
                made[id(given)] = nn.Parameter(own, given.requires_grad) if is_parameter else own
            place.tensors[place.key] = made[id(given)]

    with torch.no_grad(), ThreadPoolExecutor(num_threads) as readers:
        for _ in readers.map(replace, storages.values()):
            pass
    return cuts, head


class _Place(NamedTuple):
    """A parameter or buffer: its name, its cut, and the dictionary of its module that has it."""

    name: str
    cut: Cut | None
    tensors: Any
    key: str
    tensor: Tensor


def _separate(module: PreTrainedModel, regions: CheckpointRegions, checkpoint: Checkpoint) -> None:
    """Separate tied parameters that have different values in the checkpoint, as transformers
    does."""
    for group in regions.tied:
        names = iter(group.items())
        _, first = next(names)
        for parameter, name in names:
            if not torch.equal(checkpoint.get(first), checkpoint.get(name)):
                owner, _, key = parameter.rpartition(".")
                part = module.get_submodule(owner)
                part.register_parameter(key, nn.Parameter(torch.empty_like(getattr(part, key))))


def _set_dtypes(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Apply transformers' list of parameters that stay in float32."""
    plan = module._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, globs, _ = build_glob_alternation(list(plan))
    made: dict[int, Any] = {}
    for prefix, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                found = pattern.search(f"{prefix}.{key}")
                if tensor is None or found is None or key in part._non_persistent_buffers_set:
                    continue
                kept = plan[globs[str(found.lastgroup)]]
                if id(tensor) not in made:
                    like = torch.empty_like(tensor, dtype=kept)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(like, True) if is_parameter else like
                tensors[key] = made[id(tensor)]


def _check_complete(
    model: str, module: PreTrainedModel, regions: CheckpointRegions, missing: set[str]
) -> None:
    """Raise InvalidInputError if the checkpoint does not have all weights."""
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_missing or ()]
    is_known = {name for name in missing if any(p.search(name) for p in ignored)}
    mismatched = set(regions.mismatched)
    raise_incomplete(model, missing - is_known - mismatched, mismatched)


class _Converted:
    """Parameters whose conversion no boxes describe. Their tensors are converted whole by
    transformers, one conversion at a time."""

    def __init__(self, model: str, module: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model = model
        self._module, self._checkpoint = copy.deepcopy(module), checkpoint
        self._shapes = {name: tensor.shape for name, tensor in self._module.state_dict().items()}
        self._lock = Lock()
        self._latest: tuple[Group | None, Mapping[str, Any]] = None, {}

    def get(self, name: str, group: Group) -> Tensor:
        """The whole parameter.

        Raises:
            InvalidInputError: the conversion fails, or gives another shape.
        """
        with self._lock:
            if self._latest[0] is not group:
                self._latest = None, {}  # freed first
                self._latest = group, self._convert(group)
            found = self._latest[1].get(name)
        value = found[0] if isinstance(found, list) else found
        if not isinstance(value, Tensor) or value.shape != self._shapes[name]:
            limit = f"must have all weights; {name} has another shape than config.json says"
            raise InvalidInputError("model", self._model, limit)
        return value

    def _convert(self, group: Group) -> Mapping[str, Any]:
        converter = copy.deepcopy(group.converter)
        for pattern, names in group.sources.items():
            for name in names:
                read: Any = partial(self._checkpoint.get, name)
                converter.add_tensor(group.parameter, name, pattern, read)
        config = self._module.config
        made: Mapping[str, Any] = converter.convert(
            group.parameter, model=self._module, config=config
        )
        return made
