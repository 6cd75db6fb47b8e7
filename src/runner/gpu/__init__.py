"""The runner on a GPU: ``runner`` and ``pack`` (staging a step), ``unpack_kernels``,
``device_buffers``, ``cuda_graphs`` (the step on the device), ``sampler`` (sampling, in the graph
and after it), ``edits`` (rows whose logits are edited or masked), ``logprobs``, ``drafting`` and
``draft_kernels`` (a second model), ``platform`` and ``startup``.
"""
