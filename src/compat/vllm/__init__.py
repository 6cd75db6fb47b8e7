"""``import pagespec.compat.vllm as vllm``: the names of ``pagespec``, and vLLM's modules.

Each module is found under several names, such as ``pagespec.sampling_params`` and
``pagespec.compat.vllm.sampling_params``. Their imports are therefore absolute, against the custom
of this package. The classes are the same objects.
"""

import pagespec
from pagespec import __all__ as __all__


def __getattr__(name: str) -> object:
    return getattr(pagespec, name)
