"""Chains of small operations as one kernel each, with roundings where PyTorch rounds.

Modules, in reading order: ``dispatch`` (the functions that a graph calls, and their torch
references), ``rounding`` (how bits are kept equal), ``rms_norm``, ``activation``, ``rope_cos_sin``,
``e4m3_groups``, ``quantize_rows``, ``kv_store``, ``norm_rope_store``; ``cpu_activation`` (for
CPUs).

``collectives``, ``attention``, ``matmul``, ``moe``, ``ops`` and ``compile`` may import this
package.
"""
