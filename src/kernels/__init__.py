"""The kernels: attention, linear layers, experts, fused operations and sampling, on GPU and CPU.

Read in this order: ``ops`` (the custom ops of a captured graph, with all shapes), ``arguments``
(what travels together), ``attention`` (paged attention and its backends), ``fused`` (norms,
activations, RoPE with KV store), ``matmul`` (batch-invariant matmuls, on a GPU with cuBLAS's bits),
``moe`` (mixtures of experts), ``sparse`` (indexers, and attention to chosen positions),
``native`` (a CPU's own kernels in C++, for such models), ``recurrent`` (states of recurrent
layers), ``mla`` (latent attention), ``sampling``, ``collectives`` (sums over several GPUs), ``jit``
(how Triton's kernels are compiled ahead), ``device`` (facts of the GPU), ``e4m3`` (8-bit floats on
a CPU).

All are batch-invariant: a row's bits do not depend on the rows beside it. ``compile`` and
``runner`` may import this package; it imports neither, nor ``engine``.
"""
