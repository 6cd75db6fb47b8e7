"""Linear layers: batch-invariant matmuls, on a GPU with cuBLAS's bits.

Read in this order: ``dispatch`` (the entry: our kernels for few rows, cuBLAS or ours for many),
``matmul`` (Triton); ``wide_matmul`` (float32 results of 16-bit operands, Triton); ``tiles`` and
``tuned_tiles``; ``plan`` and ``plan_cache`` (up to how many rows our kernels serve); ``cublas``
(its settings). Then ``sm90`` (Gluon, Hopper), ``quantized`` (weights that stay quantised) and
``cpu``.

Imports ``fused`` and ``native``. May be imported by ``moe``, ``mla``, ``compile`` and ``runner``.
"""
