"""Traces a model's ``forward`` into one FX graph, and keeps the graph on the disk.

Read in this order: ``dynamo`` (the trace), ``few_layers``, ``layer_groups`` and ``repeat_layers``
(trace some layers, repeat them to the graph of all), ``graph_cache`` and ``process_key`` (the cache
and its key), ``graph_json`` and ``meta_json`` (a graph and its results as JSON, with no code in
it), ``results`` (results read without symbols).

Imports ``compile.model`` and ``compile.fx``. Imported by ``compile.captured_model``,
``compile.start_record`` and ``build``.
"""
