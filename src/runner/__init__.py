"""The model runners: compute the engine's plans, on a CPU or with CUDA graphs on a GPU.

Packages ``cpu`` and ``gpu`` have the two runners; begin with ``cpu``, a step in its simplest form.
Common to both: ``bases``, ``layout`` (the fields of a step), ``row_params``, ``pinned``,
``block_tables``, ``block_copies``, ``constrained`` (rows that wait for bitmasks), ``edit_batch``,
``logprob_rows``, ``draft_model``; ``platform`` (startup per device), ``step_costs``, ``kv_budget``,
``memory_profile``, ``host_memory``, ``weight_budget`` (the size of the KV cache).

Imports ``structured``, ``compile``, ``kernels`` and the plans of ``engine``. ``build`` imports this
package.
"""
