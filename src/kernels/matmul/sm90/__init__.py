"""Matmuls in Gluon for Hopper: weights are loaded before the kernel in front has ended.

Of each format two kernels: ``matmul_sm90`` (bfloat16) and ``matmul_fp8_sm90`` are skinny, for few
rows in one wave of programs; ``matmul_sm90_many`` and ``matmul_fp8_sm90_many`` are persistent, with
producer warps. The formats share loads and stores, not the loop over K: FP8 scales each group of
128 before it is added, so a stage waits for its matmuls, while bfloat16 refills one stage later.

``kernels.families.sm90`` registers them.
"""
