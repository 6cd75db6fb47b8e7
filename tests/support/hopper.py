"""Whether the present GPU has the Hopper kernels."""

from __future__ import annotations

import torch

from pagespec.kernels.arch import Arch


def has_hopper_kernels() -> bool:
    """Whether there is a Hopper GPU and a Triton whose Gluon version is supported."""
    if not torch.cuda.is_available():
        return False
    return Arch.of(torch.device("cuda")) == Arch("sm90", has_gluon=True)
