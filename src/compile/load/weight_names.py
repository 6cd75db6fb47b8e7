"""The names of a checkpoint's tensors, and the regions of parameters that they fill.

They are read from the headers of the safetensors files and from transformers' own table of
conversions, with a module on the meta device: no weight is read. A conversion is described by the
boxes that tensors fill (``stack``, ``cat``, ``transpose``, ``chunk``). Any other conversion is
refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
)

from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ..model.loaded import named_tensors
from ..weights import Changes, Cut, Region, check_value, refused
from .checkpoint import Checkpoint, files_of
from .quantized_load import (
    CheckpointNames,
    described,
    linears_of,
    quantization_of,
    stays_quantised,
)


class FolderNames:
    """The names of a folder, or of a hub id that was loaded before.

    Args:
        name, files: see :class:`.ModelSource`.
        quantization: "fp8" if linear layers were quantised when they were loaded.

    Raises:
        Exception: of any type, if the files no longer exist.
    """

    def __init__(self, name: str, files: str, quantization: str | None) -> None:
        config = AutoConfig.from_pretrained(files, trust_remote_code=False)
        self._name = name
        if quantization_of(config) is not None and not stays_quantised(config):
            raise refused(name, "holds weights that transformers expands as it loads them")
        _, self._skeleton, self._scheme = described(name, config, quantization)
        folder = files_of(files, local_files_only=True)
        try:
            self._checkpoint = Checkpoint(folder)
        except OSError as error:
            raise refused(name, f"has no safetensors files ({error})") from error
        self.names: Sequence[str] = sorted(self._checkpoint.names, key=dot_natural_key)
        self._shapes = {n: t.shape for n, t in self._skeleton.state_dict().items()}

    @property
    def ties(self) -> Sequence[Sequence[str]]:
        return [
            list(group.values()) for group in self._regions.tied if len(set(group.values())) > 1
        ]

    def regions(self, name: str) -> Sequence[Region]:
        if name not in self._checkpoint:
            raise refused(name, f"is no tensor of {self._name}")
        layer = self._layer_of(name)
        if layer is not None:
            parameter = f"{layer[0]}.weight"
            return [Region.whole(parameter, self._shapes[parameter])]
        found = self._regions.table[name]
        if isinstance(found, str):
            raise refused(name, found)
        return found

    def changes(self, values: Mapping[str, Tensor], held: Mapping[str, Any]) -> Changes:
        regions: list[tuple[Region, Tensor]] = []
        layers: dict[str, dict[str, Tensor]] = {}
        for name, value in values.items():
            own = self.regions(name)
            check_value(name, value, self._checkpoint.get(name))
            layer = self._layer_of(name)
            if layer is None or f"{layer[0]}.weight" not in held:
                regions += [(region, value) for region in own]
            else:
                layers.setdefault(layer[1], {})[name.rpartition(".")[2]] = value
        return Changes(regions, dict(self._read(file, layers[file], held) for file in layers))

    def _read(
        self, file: str, parts: dict[str, Tensor], held: Mapping[str, Any]
    ) -> tuple[str, QuantizedWeight]:
        assert self._scheme is not None  # the scheme has a layer
        missing = [
            n for n in self._scheme.known if n not in parts and f"{file}.{n}" in self._checkpoint
        ]
        if missing:
            first = sorted(parts)[0]
            limit = f"must be written in one call with {', '.join(sorted(missing))}"
            raise refused(f"{file}.{first}", limit)
        layer = self._layers[file]
        parameter = f"{layer}.weight"
        device = held[parameter].parts[0].device
        moved = {name: part.to(device) for name, part in parts.items()}
        num_outputs, num_inputs = self._shapes[parameter]
        return parameter, self._scheme.read_layer(layer, moved, (num_outputs, num_inputs))

    @cached_property
    def _regions(self) -> CheckpointRegions:
        return CheckpointRegions(self._checkpoint, self._skeleton)

    @cached_property
    def _layers(self) -> dict[str, str]:
        """The quantised layers, by their names in the checkpoint."""
        if self._scheme is None:
            return {}
        linears = linears_of(self._skeleton)
        found = self._scheme.layers(self.names, self._regions.conversions.parameter)
        return {file: layer for file, layer, is_out in found if layer in linears and not is_out}

    def _layer_of(self, name: str) -> tuple[str, str] | None:
        """The quantised layer that contains the tensor, in the module and in the checkpoint."""
        file, _, part = name.rpartition(".")
        if self._scheme is None or part not in self._scheme.known or file not in self._layers:
            return None
        return self._layers[file], file


class Group(NamedTuple):
    """A conversion of several tensors, or to several parameters.

    Attributes:
        parameter: the first one that is made.
        sources: the names of its tensors by pattern of the converter, in order.
    """

    parameter: str
    converter: WeightConverter
    sources: dict[str, list[str]]


class CheckpointRegions:
    """The regions of a module that the tensors of a checkpoint fill.

    Args:
        module: whole; may be on the meta device.

    Attributes:
        table: for each tensor the regions that it fills, including those of tied parameters, or
            the reason why they are unknown.
        not_followed: by parameter, conversions that no boxes describe.
        mismatched: parameters whose tensors have other shapes.
    """

    def __init__(self, checkpoint: Checkpoint, module: PreTrainedModel) -> None:
        self.conversions = CheckpointNames(module)
        self.not_followed: dict[str, Group] = {}
        self.mismatched: list[str] = []
        self._checkpoint = checkpoint
        self._shapes = {n: t.shape for n, t in module.state_dict().items()}
        self._aliases = aliases_of(module)
        self.table = self._read()

    @cached_property
    def tied(self) -> Sequence[Mapping[str, str]]:
        """For each tied parameter, the tensors that fill it, by its names."""
        groups: dict[str, dict[str, str]] = {}
        for name, found in self.table.items():
            for region in found if isinstance(found, list) else ():
                first = self._aliases[region.parameter][0]
                groups.setdefault(first, {})[region.parameter] = name
        return list(groups.values())

    def _read(self) -> dict[str, list[Region] | str]:
        table: dict[str, list[Region] | str] = {}
        groups: dict[str, Group] = {}
        for name in sorted(self._checkpoint.names, key=dot_natural_key):
            parameter, pattern, converter = self.conversions.match(name)
            if parameter is None:
                table[name] = "is not read by the model"
            elif converter is None or pattern is None:
                table[name] = self._whole(parameter, name)
            else:
                group = groups.setdefault(parameter, Group(parameter, converter, {}))
                group.sources.setdefault(pattern, []).append(name)
        for parameter, group in groups.items():
            try:
                shapes = {
                    pattern: {name: self._checkpoint.get(name).shape for name in names}
                    for pattern, names in group.sources.items()
                }
                table |= regions_of(parameter, group.converter, shapes, self._shapes)
            except ValueError as error:
                table |= {name: str(error) for names in group.sources.values() for name in names}
                self.not_followed |= dict.fromkeys(_targets_of(group), group)
        self._tie(table)
        return table

    def _whole(self, parameter: str, name: str) -> list[Region] | str:
        shape = self._shapes[parameter]
        found = self._checkpoint.get(name).shape
        if found == shape:
            return [Region.whole(parameter, shape)]
        self.mismatched.append(parameter)
        return f"has shape {tuple(found)}, and {parameter} has {tuple(shape)}"

    def _tie(self, table: dict[str, list[Region] | str]) -> None:
        """Add the parameters that are tied to those in the checkpoint."""
        filled = {r.parameter for found in table.values() if isinstance(found, list) for r in found}
        for found in table.values():
            for region in list(found) if isinstance(found, list) else ():
                assert isinstance(found, list)  # it has regions
                for alias in self._aliases[region.parameter]:
                    if alias not in filled:
                        found.append(replace(region, parameter=alias))


def _targets_of(group: Group) -> list[str]:
    """The parameters that a conversion makes."""
    targets = group.converter.target_patterns
    first = next((target for target in targets if target in group.parameter), None)
    if first is None:
        return [group.parameter]
    prefix, _, suffix = group.parameter.partition(first)
    return [prefix + target + suffix for target in targets]


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """For each name of a parameter or buffer all of its names, which tied ones share."""
    named, found = dict(named_tensors(module)), defaultdict[int, list[str]](list)
    for name, tensor in named.items():
        found[id(tensor)].append(name)
    return {name: found[id(tensor)] for name, tensor in named.items()}


def regions_of(
    parameter: str,
    converter: WeightConverter,
    sources: Mapping[str, Mapping[str, Sequence[int]]],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, list[Region]]:
    """The boxes that the tensors of one conversion fill, by name.

    Args:
        parameter: the first one that is made. shapes: of the module's parameters.
        sources: by pattern of the converter, the shapes of its tensors by name, in order.

    Raises:
        ValueError: boxes do not describe the conversion completely.
    """
    merged: dict[str, Any] = {
        pattern: [_Merged.of(name, shape) for name, shape in tensors.items()]
        for pattern, tensors in sources.items()
    }
    targets = list(converter.target_patterns)
    for operation in converter.operations:
        kind = type(operation).__name__
        if isinstance(operation, MergeModulelist):
            merged = {key: _stacked(parts, operation.dim) for key, parts in merged.items()}
        elif isinstance(operation, Concatenate) and operation.num_shards_attribute is None:
            order = [key for key in converter.source_patterns if key in merged]
            parts = [part for key in order for part in _listed(merged[key])]
            merged = {targets[0]: _concatenated(parts, operation.dim)}
        elif isinstance(operation, Transpose):
            [one] = [part for parts in merged.values() for part in _listed(parts)]
            is_kept = operation.check_dims and tuple(one.shape) == tuple(shapes[parameter])
            turned = one if is_kept else one.transposed(operation.dim0, operation.dim1)
            merged = {targets[0]: turned}
        elif isinstance(operation, Chunk) and operation.num_shards_attribute is None:
            [one] = [part for parts in merged.values() for part in _listed(parts)]
            chunks = one.chunks(len(targets), operation.dim)
            merged = dict(zip(targets, chunks, strict=True))
        else:
            raise ValueError(f"is converted by {kind}, which cannot be followed")
    table: dict[str, list[Region]] = {}
    first = next(key for key in [*merged, *targets] if key in parameter)
    prefix, _, suffix = parameter.partition(first)
    for key, parts in merged.items():
        [whole] = _listed(parts)
        target = parameter if len(merged) == 1 else prefix + key + suffix
        if tuple(shapes.get(target, ())) != tuple(whole.shape):
            raise ValueError(f"does not fill {target} as it is converted")
        for name, region in whole.regions:
            table.setdefault(name, []).append(replace(region, parameter=target))
    return table


class _Merged:
    """An intermediate tensor, with the boxes that the checkpoint's tensors fill in it."""

    def __init__(self, shape: Sequence[int], regions: list[tuple[str, Region]]) -> None:
        self.shape = torch.Size(shape)
        self.regions = regions

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> _Merged:
        return cls(shape, [(name, Region.whole("", shape))])

    def rearranged(self, turn: Callable[[Sequence[Any], Any], tuple[Any, ...]]) -> _Merged:
        """With rearranged dimensions: ``turn`` is applied to the dimensions of each box, and to
        those of a new one."""
        regions = [
            (n, replace(r, begin=turn(r.begin, 0), sizes=turn(r.sizes, 1), dims=turn(r.dims, None)))
            for n, r in self.regions
        ]
        return _Merged(turn(self.shape, 1), regions)

    def unsqueezed(self, dim: int) -> _Merged:
        return self.rearranged(lambda values, new: (*values[:dim], new, *values[dim:]))

    def transposed(self, dim0: int, dim1: int) -> _Merged:
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.rearranged(lambda values, _: tuple(values[place] for place in order))

    def chunks(self, count: int, dim: int) -> list[_Merged]:
        size = -(-self.shape[dim] // count)
        made = []
        for begin in range(0, self.shape[dim], size):
            end = min(begin + size, self.shape[dim])
            cut = Cut(dim, ((begin, end),))
            regions = [(name, box) for name, r in self.regions for box in r.within(cut)]
            made.append(_Merged(_set(self.shape, dim, end - begin), regions))
        return made


def _stacked(parts: Sequence[_Merged], dim: int) -> _Merged:
    if len({part.shape for part in parts}) != 1:
        raise ValueError("is stacked with tensors of other shapes")
    return _concatenated([part.unsqueezed(dim) for part in parts], dim)


def _concatenated(parts: Sequence[_Merged], dim: int) -> _Merged:
    if len({_set(part.shape, dim, 0) for part in parts}) != 1:
        raise ValueError("is joined with tensors of other shapes")
    regions, size = [], 0
    for part in parts:
        for name, r in part.regions:
            regions.append((name, replace(r, begin=_set(r.begin, dim, r.begin[dim] + size))))
        size += part.shape[dim]
    return _Merged(_set(parts[0].shape, dim, size), regions)


def _listed(parts: Any) -> list[_Merged]:
    return parts if isinstance(parts, list) else [parts]


def _set(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    found = list(values)
    found[place] = value
    return tuple(found)
