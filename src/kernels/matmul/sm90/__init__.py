"""Matmuls in Gluon for Hopper. They load weights before the preceding kernel has ended.

Each format has two kernels. ``matmul_sm90`` (bfloat16) and ``matmul_fp8_sm90`` are skinny, for few
rows in one wave of programs. ``matmul_sm90_many`` and ``matmul_fp8_sm90_many`` are persistent, with
producer warps. The formats share loads and stores, but not the loop over K. FP8 scales each group
of 128 before adding it, so a stage waits for its matmuls. bfloat16 refills a stage one step later.

``kernels.families.sm90`` registers them.
"""
