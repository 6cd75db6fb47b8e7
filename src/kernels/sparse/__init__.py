"""Sparse attention: an indexer scores the cached positions, and a row attends to the best of them.

Read in this order: ``indexer`` (scores and choice on a CPU, and the reference), ``index_kernels``
(the same on a GPU), ``chosen`` (attention to the chosen positions, on a GPU).

Imports ``attention``. May be imported by ``mla``, ``ops`` and ``compile``.
"""
