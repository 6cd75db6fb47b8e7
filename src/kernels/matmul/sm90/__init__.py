"""Matmuls in Gluon for Hopper: weights are loaded before the kernel in front has ended.

Of each format two kernels: ``matmul_sm90`` (bfloat16) and ``matmul_fp8_sm90`` are skinny, for few
rows in one wave of programs; ``matmul_sm90_many`` and ``matmul_fp8_sm90_many`` are persistent, with
producer warps. ``kernels.families.sm90`` registers them.
"""
