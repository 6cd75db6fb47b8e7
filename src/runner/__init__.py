"""The model runners: compute the engine's plans, on a CPU or with CUDA graphs on a GPU.

Read in this order: ``layout`` (the fields of a step); ``bases`` (what runners have in
common); ``cpu_runner`` and ``cpu_pack`` (the whole
way of a step, in its simplest form);
``gpu_runner``, ``gpu_pack``, ``row_params``, ``pinned``, ``block_tables`` (what is sent),
``unpack_kernels``, ``device_buffers`` (what becomes of it there), ``cuda_graphs``;
``gpu_sampler`` (the order of what is sampled, in the graph and behind it);
``edit_batch``, ``cpu_edits``, ``gpu_edits`` (rows whose logits are edited or masked);
``logprob_fields``, ``cpu_logprobs`` and ``gpu_logprobs`` (log-probabilities, of rows that ask);
then ``platform`` with ``cpu_platform``
and ``gpu_platform`` (how a start differs by device), ``gpu_startup``, ``kv_budget``,
``memory_profile``, ``host_memory`` (how large the KV cache is).

Imports ``structured``, ``compile``, ``kernels`` and the plans of ``engine``. Imported by ``build``.
"""
