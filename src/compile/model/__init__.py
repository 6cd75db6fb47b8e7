"""How a module is called, and what stands for its attention, recurrences and indexers.

Read in this order: ``loaded`` (what an engine knows of a model), ``forward`` (how it is told
positions), ``current_step`` (the step whose pass a thread is in), ``attention``, ``recurrent`` and
``indexers`` with ``index_scores`` (the functions that it calls in place of its own),
``plain_attention`` with ``plain_scores`` (models that write attention out), ``local_calls`` (the
same of one token alone), ``linear_weights`` (a module whose weights are held quantised), ``layers``
(which are alike), ``eager_head`` (the head of a module that runs as it is).

Imports ``compile.fx`` and ``kernels``. Imported by the other rooms of ``compile``, and for
``loaded`` by ``build`` and ``distributed``.
"""
