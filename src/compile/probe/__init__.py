"""The requirements of the unmodified module, and whether they can be computed exactly.

Modules, in reading order: ``probe_pass`` (a pass without cache, mask or graph), ``probe`` (the
passes of a few tokens) with ``call_recorder`` (the requirements of each call) and ``masks`` (a
mask's pattern, a bias's slopes); then ``reach_probe`` (whether a token depends on others outside
attention, at any length) with ``thresholds`` (which lengths) and ``cheap_passes`` (the same in less
time).

Imports ``compile.model``, ``compile.fx`` and ``kernels``. It does not depend on how a module was
loaded. ``build`` imports this package.
"""
