"""From a folder, a hub id, a GGUF file or a module in memory to a module on its device.

Modules, in reading order: ``source`` (where a model's files are, with ``gguf`` and ``gguf_check``),
``load`` (the steps for each source, with ``build_module`` and ``generation_config``),
``checkpoint`` (tensors without a module), ``gguf_blocks`` and ``quantized_load`` (weights that stay
quantised, with ``quantization_schemes`` and ``int4_layouts``), ``gguf_vocabulary``,
``gguf_tokenizer`` and ``gguf_expressions`` (the tokenizer of a GGUF file), ``tensor_parallel`` (one
rank's shard of a model, by transformers' plan), ``slices`` (memory and values for that shard alone)
and ``initial_values`` (random values by slice), ``weight_names`` and ``weight_names_gguf`` (the
parameters that a checkpoint's tensors fill, for ``slices`` and the weight map).

Imports ``compile.model``, ``compile.fx`` and ``kernels``. ``start_record`` and ``start_tensors`` of
``compile``, and ``build``, ``distributed`` and ``cli`` import this package.
"""
