"""Loads a model and finds out whether, and how, this engine can run it.

Read in this order: ``loaded`` (what an engine knows of a model), ``source`` (with ``embedded``,
``gguf`` and ``gguf_blocks``), ``load`` (with ``refusal``), ``checkpoint`` (tensors without a
module), ``attention`` (the function that the model calls in place of its own), ``probe`` (what that
function is asked for), ``masks`` (the window of a mask), ``probe_pass``, ``reach_probe``,
``thresholds`` (does a token depend on others outside attention, at any length?), ``cheap_passes``
and ``layers`` (the same in less time).

``eager_head`` gives the head of a module that runs as it is.

``tensor_parallel`` and ``parallel_styles`` keep one rank's part of a model, by the plan that
transformers has for it.

Imports ``compile.fx`` and ``kernels``. Imported by the other rooms of ``compile``, and ``build``.
"""
