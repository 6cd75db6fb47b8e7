"""The operations around latent attention in DeepSeek-V2-Lite's layers, on a GPU: us per layer.

    python -m benchmarks.mla_rope [--tokens 1 64 256 8192]

Compares two launches, in which the kernels that store latents and absorb queries also normalise and
rotate, with the three launches that do the same without the rotation.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
from collections.abc import Callable

import torch

from benchmarks.mla import BF16, NOPE, PAGE, RANK, ROPE, WIDTH, seconds_of
from pagespec.kernels.arguments import LatentInputs
from pagespec.kernels.fused.dispatch import rms_norm
from pagespec.kernels.mla import dispatch

NUM_HEADS = 16
LAYERS = 8
Calls = tuple[Callable[[], None], Callable[[], None]]


def rotation(num_tokens: int) -> Calls:
    """(norm, rotation, store and absorbed query; norm, store and absorbed query)."""
    width = NUM_HEADS * (NOPE + ROPE)
    to_latent = torch.randn(NUM_HEADS, NOPE, RANK, dtype=BF16, device="cuda")
    weight = torch.ones(RANK, dtype=BF16, device="cuda")
    cos, sin = (torch.randn(1, num_tokens, ROPE // 2, device="cuda") for _ in range(2))
    cache = torch.empty(num_tokens // PAGE + 1, PAGE, 1, WIDTH, dtype=BF16, device="cuda")
    slots = torch.arange(num_tokens, device="cuda")
    given = []
    for _ in range(LAYERS):
        merged = torch.randn(1, num_tokens, width + WIDTH, dtype=BF16, device="cuda")
        query, latent, rope = merged.split((width, RANK, ROPE), -1)
        given.append((query.view(num_tokens, NUM_HEADS, -1), latent, rope[None]))

    def together() -> None:
        for query, latent, rope in given:
            inputs = LatentInputs(latent, rope, cos, sin, weight, 1e-6, "rounded")
            dispatch.norm_rope_store_latent(inputs, cache, slots)
            dispatch.rope_latent_query(query, cos, sin, to_latent)

    def apart() -> None:
        for query, latent, rope in given:
            normed = rms_norm(latent, weight, 1e-6, "rounded")
            dispatch.store_latent(normed, rope, cache, slots)
            dispatch.latent_query(query, to_latent)

    return together, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 256, 8192])
    options = parser.parse_args()
    print("us per layer; tokens | with rotation  without")
    for num_tokens in options.tokens:
        took = [seconds_of(call, calls=LAYERS) * 1e6 for call in rotation(num_tokens)]
        print(f"{num_tokens:6} | {took[0]:13.1f} {took[1]:8.1f}", flush=True)


if __name__ == "__main__":
    main()
