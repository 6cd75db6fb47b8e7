"""The HTTP server: OpenAI's interface, and vLLM's additions to it, over one ``AsyncLLM``.

Read in this order: ``config`` and ``context`` (what everything here is given), ``app`` (how a
request passes: middlewares, then routers), ``errors`` (every answer that is none), ``security``
and ``limits`` (the middlewares); then the routers, of which those that generate share ``call``,
``sampling``, ``logprobs`` and ``sse``; ``run`` (the process: signals, exit codes).

FastAPI is imported here only. Imported by the command line.
"""
