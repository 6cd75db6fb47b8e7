"""What the untouched module needs of this engine, and whether that can be computed exactly.

Read in this order: ``probe_pass`` (a pass without cache, mask or graph), ``probe`` (the passes of a
few tokens) with ``call_recorder`` (what each call needs) and ``masks`` (a mask's pattern, a bias's
slopes); then ``reach_probe`` (does a token
depend on others outside attention, at any length?) with ``thresholds`` (which lengths) and
``cheap_passes`` (the same in less time).

Imports ``compile.model``, ``compile.fx`` and ``kernels``; how a module was loaded is nothing to it.
Imported by ``build``.
"""
