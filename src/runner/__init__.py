"""The model runners: compute the engine's plans, on a CPU or with CUDA graphs on a GPU.

Modules, in reading order: ``layout`` (the fields of a step); ``bases`` (common to both runners);
``cpu_runner`` and ``cpu_pack`` (a step in its simplest form); ``gpu_runner``, ``gpu_pack``,
``row_params``, ``pinned``, ``block_tables`` (staging); ``unpack_kernels``, ``device_buffers``,
``cuda_graphs`` (the step on the device); ``gpu_sampler`` (sampling, in the graph and after it);
``constrained`` (rows that wait for bitmasks); ``edit_batch``, ``cpu_edits``, ``gpu_edits`` (rows
whose logits are edited or masked); ``logprob_rows``, ``gpu_logprobs``; then ``platform`` with
``cpu_platform`` and ``gpu_platform`` (startup per device), ``gpu_startup``, ``kv_budget``,
``memory_profile``, ``host_memory`` (the size of the KV cache).

Imports ``structured``, ``compile``, ``kernels`` and the plans of ``engine``. ``build`` imports this
package.
"""
