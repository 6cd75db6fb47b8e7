"""Which parameter of a module a tensor of its checkpoint becomes, by transformers' own table.

Some checkpoints have other names than the module, from before their model was part of transformers,
or of another class of it; ``from_pretrained`` renames as it loads.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class CheckpointNames:
    """The renamings of one module, which may be on the meta device."""

    def __init__(self, module: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(module)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = module.base_model_prefix
        self._known = module.state_dict()

    def parameter(self, name: str) -> str | None:
        """What the tensor of this name in a checkpoint becomes as it is; None if it is merged with
        others, split or turned, or is none of the module's."""
        found, pattern, _ = self.match(name)
        return found if pattern is None else None

    def match(self, name: str) -> tuple[str | None, str | None, WeightConverter | None]:
        """The parameter that the tensor becomes or is a part of, the first one where it becomes
        several; the pattern that its name matches, and the conversion of that, if there is one.
        None if it is none of the module's."""
        found, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        if found not in self._known and name in self._known:
            found, pattern = rename_source_key(name, [], [], self._prefix, self._known)
        if found not in self._known:
            return None, None, None
        return found, pattern, None if pattern is None else self._by_pattern[pattern]
