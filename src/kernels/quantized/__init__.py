"""Linear layers whose weights stay quantised, on a CPU and on a GPU.

Read in this order: ``quantized_weight`` (the forms a weight is held in); on a CPU
``cpu_quantized`` (matmuls with 4 and 8 bits) and ``cpu_expanded`` (matmuls that expand some outputs
at a time); FP8 on a GPU: ``dispatch_fp8``, ``matmul_fp8`` (Triton), ``matmul_fp8_sm90`` and
``matmul_fp8_sm90_many`` (Gluon, Hopper), ``tiles_fp8``; 4 and 8 bits on a
GPU: ``dispatch_int4``, ``int4_packing``, ``matmul_int4`` with ``int4_unpacking``, ``plan_int4`` (up
to how many rows it unpacks).

Imports ``linear``, ``linear_cpu``, ``fused`` and ``native``. May be imported by ``compile``.
"""
