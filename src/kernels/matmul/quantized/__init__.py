"""Linear layers whose weights stay quantised.

Modules, in reading order: ``quantized_weight`` (the storage forms of a weight). FP8 on a GPU:
``dispatch_fp8``, ``matmul_fp8`` (Triton), ``tiles_fp8``. 4 and 8 bits on a GPU: ``dispatch_int4``,
``int4_packing``, ``matmul_int4`` with ``int4_unpacking``, ``plan_int4`` (the row limit of unpacking
within the matmul). Kernels for Hopper are in ``matmul.sm90``, those of a CPU in ``matmul.cpu``.
"""
