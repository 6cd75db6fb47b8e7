"""Trace a model's ``forward`` into one FX graph, and store the graph on disk.

Modules, in reading order: ``dynamo`` (the trace), ``few_layers``, ``layer_groups`` and
``repeat_layers`` (trace some layers, and repeat them to the whole graph), ``graph_cache`` and
``process_key`` (the cache and its key), ``graph_json`` and ``meta_json`` (a graph and its results
as JSON, without code), ``results`` (results without symbols).

Imports ``compile.model`` and ``compile.fx``. ``compile.captured_model``, ``compile.start_record``
and ``build`` import this package.
"""
