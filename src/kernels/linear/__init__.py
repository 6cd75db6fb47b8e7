"""Linear layers: batch-invariant matmuls, with cuBLAS's bits on a GPU.

Read in this order: ``dispatch`` (a GPU's entry: our kernels for few rows, cuBLAS or ours for many),
``matmul`` (Triton), ``matmul_sm90``, its ``_launch`` and ``norm_matmul_sm90``, ``matmul_sm90_many``
and its ``_launch`` (Gluon, Hopper),
``row_parallel`` (a rank's part of a sum, pushed as it is computed);
``wide_matmul`` (float32 results of 16-bit operands, Triton);
``route``, ``sort_by_expert``, ``expert_rows`` and ``grouped_mm`` (mixture of experts, in the order
of a layer); ``tiles`` and ``tuned_tiles``; ``plan`` and ``plan_cache`` (up to how many rows our
kernels serve); ``cublas`` (its settings);
``cpu_invariant``, ``cpu_product``, ``recipe_cache``, ``cpu_few_rows`` (a CPU's);
``quantized_weight``, ``fp8``, ``cpu_quantized`` and ``cpu_expanded`` (weights that stay quantised
there); ``dispatch_fp8``, ``matmul_fp8``, ``matmul_fp8_sm90`` with its ``_few``, ``_many``,
``_gated`` and launches, and ``tiles_fp8`` (FP8 on a GPU); ``dispatch_int4``, ``int4_packing``,
``int4_unpacking``, ``matmul_int4`` and ``plan_int4`` (4 and 8 bits on a GPU).

May be imported by ``compile`` and ``runner``.
"""
