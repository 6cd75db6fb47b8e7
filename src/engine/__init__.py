"""The engine: plans each step and settles its results. No torch here.

Read in this order: ``request`` and ``plan`` (the decision for one step), ``queues``, ``ledger``,
``block_manager``, ``planner``, ``scheduler`` (dispatch and commit), ``policy`` (the order of
service), ``core`` (the step loop, around a ``runner``), ``generation`` (what ``generate`` does). At
the door: ``config``, ``sampling_params`` with ``edit_checks``, ``logit_edits``,
``structured_outputs``, ``inputs``, ``request_factory``, ``outputs``; ``text`` (detokenizer, stop
strings). ``logprobs`` and ``logprob_output`` keep log-probabilities. Beside: ``invariants``,
``trace``, ``record``.

Imports only ``params`` and ``errors``. Imported by ``runner``, ``build``, ``chat``,
``llm``, ``verify`` and ``cli``.
"""
