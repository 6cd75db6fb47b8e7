"""Multi-head latent attention in absorbed form (DeepSeek-V2, 2024): one cached vector per token.

A graph calls ``dispatch``: store, queries in the latent space, attention, values of the heads. On a
CPU ``dispatch`` uses :mod:`..attention` with one KV head, and ``head_matmul``. On a GPU it uses
``head_matmul_kernel``, and ``launch`` with ``decode``, ``prefill`` and ``tiles``; on Hopper also
``decode_sm90`` and ``prefill_sm90`` with its ``_warpgroups``.

Imports ``attention``, ``sparse``, ``matmul``, ``arguments``, ``device``. Imported by ``compile``.
"""
