"""Whether the present GPU has the Hopper kernels."""

from __future__ import annotations

import torch

from pagespec.kernels.arch import Arch


def has_hopper_kernels() -> bool:
    """A Hopper GPU, and a Triton whose Gluon is known."""
    if not torch.cuda.is_available():
        return False
    return Arch.of(torch.device("cuda")) == Arch("sm90", has_gluon=True)
