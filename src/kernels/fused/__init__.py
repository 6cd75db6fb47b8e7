"""Chains of small operations as one kernel each, rounded where PyTorch rounds.

Read in this order: ``dispatch`` (the functions a graph calls, and their references in torch),
``rounding`` (how equal bits come about), ``rms_norm``, ``activation``, ``rope_cos_sin``,
``e4m3_groups``, ``quantize_rows``, ``kv_store``, ``norm_rope_store``; ``cpu_activation`` (a CPU's).

May be imported by ``collectives``, ``attention``, ``matmul``, ``moe``, ``ops``
and ``compile``.
"""
