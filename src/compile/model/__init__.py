"""Loads a model and finds out whether, and how, this engine can run it.

Read in this order: ``loaded`` (what an engine knows of a model), ``source`` (with ``embedded``,
``gguf`` and ``gguf_blocks``), ``load`` (with ``build_module`` and ``refusal``), ``checkpoint``
(tensors without a module), ``quantized_load`` (with ``quantization_schemes``, ``quantized_layers``
and ``int4_layouts``), ``current_step`` (the step whose pass a thread is in), ``attention`` and
``recurrent`` (the functions that the model calls in place of its own), ``forward`` (how it is told
positions), ``plain_attention`` with ``plain_scores`` (models that write attention out), ``probe``
with ``attention_probe``, ``index_probe`` and ``recurrent_probe`` (what those functions are asked
for), ``masks`` (a mask's pattern, a bias's slopes), ``probe_pass``, ``reach_probe``, ``thresholds``
(does a token depend on others outside attention, at any length?), ``cheap_passes`` and ``layers``
(the same in less time).

``eager_head`` gives the head of a module that runs as it is.

``tensor_parallel`` and ``parallel_styles`` keep one rank's part of a model, by the plan that
transformers has for it.

Imports ``compile.fx`` and ``kernels``. Imported by the other rooms of ``compile``, and ``build``.
"""
