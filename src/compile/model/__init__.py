"""How a module is called, and which functions stand for its attention, recurrences and indexers.

Read in this order: ``loaded`` (a model and its properties), ``current_step`` (the step of a
thread, and the functions over its caches), ``forward`` (how a module is given positions),
``attention`` (has a model call other functions than its own) with ``recurrent``, ``indexers`` and
``plain_attention`` (how each kind is found and replaced), ``scores`` (reads how a part of a model
computes scores), ``local_calls`` (functions that mix no tokens), ``linear_weights`` (a module whose
weights are held quantised), ``layers`` (which are alike).

Imports ``compile.fx`` and ``kernels``. Imported by the other rooms of ``compile``, and for
``loaded`` by ``build`` and ``distributed``.
"""
