"""The engine: plans each step and settles its results, without importing torch.

Reading order: ``request`` and ``plan`` (the decision for one step), ``queues``, ``ledger``,
``block_manager``, ``planner``, ``scheduler`` (dispatch and commit), ``policy`` (the order of
service), ``core`` (the step loop, around a ``runner``), ``generation`` (the loop of ``generate``).
Inputs and outputs: ``config``, ``sampling_params`` with ``edit_checks``, ``logit_edits``,
``structured_outputs``, ``inputs``, ``request_factory``, ``outputs``; ``text`` (detokenizer, stop
strings). ``drafting``: draft tokens. ``logprobs``, ``logprob_output`` and ``logprob_lists`` keep
log-probabilities and give them to outputs.
Checks and traces: ``invariants``, ``trace``, ``record``.

Imports only ``params`` and ``errors``. Imported by ``runner``, ``build``, ``chat``,
``llm``, ``verify`` and ``cli``.
"""

import os

# vLLM's modules of this name, such as `engine.arg_utils` (see `compat`).
_SRC = os.path.dirname(os.path.dirname(__file__))
__path__.append(os.path.join(_SRC, "compat", "vllm", "engine"))
