"""The engine: decides what each step computes, and settles what came of it. No torch here.

Read in this order: ``request`` and ``plan`` (what is decided about, and the decision), ``queues``,
``block_manager``, ``planner``, ``scheduler`` (dispatch and commit), ``policy`` (the order of
service), ``core`` (the step loop, around a ``runner``), ``generation`` (what ``generate`` does). At
the door: ``config``, ``sampling_params`` with ``unsupported_params`` and ``edit_checks``,
``logit_edits``, ``structured_outputs``, ``inputs``, ``request_factory``, ``detokenizer``,
``outputs``. ``logprobs`` and ``logprob_output`` keep log-probabilities. Beside: ``invariants``,
``trace``, ``stats``, ``record``.

Imports only ``params``, ``errors`` and ``validation``. Imported by ``runner``, ``build``, ``chat``,
``llm``, ``verify`` and ``cli``.
"""
