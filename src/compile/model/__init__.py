"""How a module is called, and the functions that replace its attention, recurrences and indexers.

Modules, in reading order: ``loaded`` (a model and its properties), ``current_step`` (the step of a
thread, and the functions over its caches), ``forward`` (how a module receives positions),
``attention`` (replaces functions that a model calls) with ``recurrent``, ``indexers`` and
``plain_attention`` (how each kind is found and replaced), ``scores`` (derives how a part of a model
computes scores), ``local_calls`` (functions that mix no tokens), ``linear_weights`` (a module with
quantised weights), ``layers`` (which layers are equal).

Imports ``compile.fx`` and ``kernels``. The other packages of ``compile`` import this package, and
``build`` and ``distributed`` import ``loaded``.
"""
