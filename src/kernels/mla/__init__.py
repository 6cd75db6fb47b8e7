"""Multi-head latent attention in absorbed form (DeepSeek-V2, 2024): one cached vector per token.

``dispatch`` is what a graph calls: store, queries in the latent space, attention, values of the
heads. On a CPU that is :mod:`..attention` with one KV head, and ``head_matmul``; on a GPU
``head_matmul_kernel``, and ``launch`` with ``decode``, ``prefill`` and ``tiles``, on Hopper
``decode_sm90`` and ``prefill_sm90`` with its ``_warpgroups``.

Imports ``attention``, ``sparse``, ``matmul``, ``arguments``, ``device``. Imported by ``compile``.
"""
