"""Random weights for vLLM with the same distribution as pagespec's."""

from __future__ import annotations

from typing import Any

import torch


def spread_weights() -> None:
    """Give vLLM's random weights the distribution of an untrained model, as pagespec's have:
    matrices with a standard deviation of 0.02, and ones for norms.

    vLLM's own are within 0.001, so the probabilities of a router are nearly equal. With them
    DeepSeek-V2-Lite decoded faster than reading all experts allows: tokens probably chose the same
    ones (docs/notes/mla.md).
    """
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    own = weight_utils.initialize_single_dummy_weight

    @torch.no_grad()
    def initialise(param: torch.Tensor, *given: Any, **named: Any) -> None:
        is_known = param.device.type != "meta" and param.dtype in (torch.bfloat16, torch.float32)
        if not is_known:
            own(param, *given, **named)
        elif param.dim() > 1:
            param.normal_(0.0, 0.02)
        else:
            param.fill_(1.0)

    for module in (weight_utils, dummy_loader):
        module.initialize_single_dummy_weight = initialise
