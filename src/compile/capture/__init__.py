"""Traces a model's ``forward`` into one FX graph, and keeps the graph on the disk.

Read in this order: ``dynamo`` (the trace), ``few_layers``, ``layer_groups`` and ``repeat_layers``
(trace some layers, repeat them to the graph of all), ``traced`` (the result), ``graph_cache``,
``graph_key`` and ``process_key`` (what a graph depends on), ``graph_file``, ``graph_json`` and
``meta_json`` (a graph as JSON, with no code in it), ``results`` (what is recorded of its results,
read without symbols).

Imports ``compile.model`` and ``compile.fx``. Imported by ``compile.captured_model`` and ``build``.
"""
