"""From a folder, a hub id, a GGUF file or a module in memory to a module on its device.

Read in this order: ``source`` (where a model's files are, with ``gguf`` and ``gguf_check``),
``load`` (the way of each, with ``build_module`` and ``generation_config``), ``checkpoint`` (tensors
without a module), ``gguf_blocks`` and ``quantized_load`` (weights that stay quantised, with
``quantization_schemes`` and ``int4_layouts``), ``gguf_vocabulary``, ``gguf_tokenizer`` and
``gguf_expressions`` (the tokenizer of a GGUF file), ``tensor_parallel`` (one rank's part of a
model, by transformers' plan), ``weight_names`` and ``weight_names_gguf`` (which parameters a
checkpoint's tensors fill, for the weight map).

Imports ``compile.model``, ``compile.fx`` and ``kernels``. Imported by ``start_record`` and
``start_tensors`` of ``compile``, and by ``build``, ``distributed`` and ``cli``.
"""
