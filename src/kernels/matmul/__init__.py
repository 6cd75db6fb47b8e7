"""Linear layers: batch-invariant matmuls, bit-identical to cuBLAS on a GPU.

Modules, in reading order: ``dispatch`` (the entry: own kernels for few rows, cuBLAS or own kernels
for many), ``matmul`` (Triton); ``wide_matmul`` (float32 results of 16-bit operands, Triton);
``tiles`` and ``tuned_tiles``; ``plan`` and ``plan_cache`` (up to how many rows the own kernels
serve); ``cublas`` (its settings). Then ``sm90`` (Gluon, Hopper), ``quantized`` (weights that stay
quantised) and ``cpu``.

Imports ``fused`` and ``native``. ``moe``, ``mla``, ``compile`` and ``runner`` may import this
package.
"""
