"""The kernels: attention, linear layers, experts, fused operations and sampling, on GPU and CPU.

Modules, in reading order: ``ops`` (the custom ops of a captured graph, with all shapes),
``arguments`` (bundles of arguments), ``attention`` (paged attention and its backends), ``fused``
(norms, activations, RoPE with KV store), ``matmul`` (batch-invariant matmuls, bit-identical to
cuBLAS on a GPU), ``moe`` (mixtures of experts), ``sparse`` (indexers, and attention to selected
positions), ``native`` (C++ kernels for recurrent models on a CPU), ``recurrent`` (states of
recurrent layers), ``mla`` (latent attention), ``sampling``, ``collectives`` (reductions over
several GPUs), ``jit`` (ahead-of-time compilation of Triton kernels), ``device`` (properties of the
GPU), ``e4m3`` (8-bit floats on a CPU).

All kernels are batch-invariant: a row's bits do not depend on the other rows of the batch.
``compile`` and ``runner`` may import this package. This package imports neither of them, nor
``engine``.
"""
