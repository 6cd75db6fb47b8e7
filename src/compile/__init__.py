"""From a Hugging Face module to one graph that runs without guards.

Modules, in reading order: ``load`` (build the module), ``model`` (how it is called, and the
functions that replace its attention), ``probe`` (the properties of its attention calls),
``capture`` (trace it with Dynamo, or read the graph from disk), ``fx`` (helpers on graphs),
``passes`` (rewrite the graph: merge, fuse, lower to kernels), ``inductor`` (compile the regions
between kernels), and ``captured_model``, which does everything from the trace on.
``captured_drafter`` does it for a model that drafts tokens. ``step_inputs`` and ``kv_cache`` are
the inputs of a graph. ``start_record``, with ``start_tensors``, restores a model that was started
before, without its module.

Imports ``kernels``, but not ``engine``. ``runner`` and ``build`` import this package.
"""
