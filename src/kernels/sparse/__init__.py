"""Sparse attention: an indexer scores the cached positions, and a row attends to the
highest-scoring ones.

Modules, in reading order: ``indexer`` (scores and selection on a CPU, and the reference),
``index_kernels`` (the same on a GPU), ``chosen`` (attention to the selected positions, on a GPU).

Imports ``attention``. ``mla``, ``ops`` and ``compile`` may import this package.
"""
