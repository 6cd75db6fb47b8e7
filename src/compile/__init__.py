"""From a Hugging Face module to one graph that is run without guards.

Read in this order: ``load`` (make the module), ``model`` (how it is called, and what stands for its
attention), ``probe`` (what that needs), ``capture`` (trace it with Dynamo, or read the graph from
the disk), ``fx`` (helpers on graphs), ``passes`` (rewrite the graph: merge, fuse, lower to
kernels), ``inductor`` (compile what lies between kernels), and ``captured_model``, which does all
from the trace on. ``step_inputs`` and ``kv_cache`` are what a graph is given.
``start_record``, with ``start_tensors``, restores a model that was started before, without its
module.

Imports ``kernels``, and not ``engine``. Imported by ``runner`` and ``build``.
"""
