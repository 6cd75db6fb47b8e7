"""Linear layers on a GPU: batch-invariant matmuls, with cuBLAS's bits.

Read in this order: ``dispatch`` (the entry: our kernels for few rows, cuBLAS or ours for many),
``matmul`` (Triton), ``matmul_sm90`` (with the norm before it) and ``matmul_sm90_many`` (Gluon,
Hopper); ``wide_matmul`` (float32 results of 16-bit operands, Triton); ``tiles`` and
``tuned_tiles``; ``plan`` and ``plan_cache`` (up to how many rows our kernels serve);
``cublas`` (its settings).

May be imported by ``experts``, ``quantized``, ``compile``, ``runner`` and the engine's builders.
"""
