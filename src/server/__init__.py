"""The HTTP server: OpenAI's interface, and vLLM's additions to it, over one ``AsyncLLM``.

Read in this order: ``config`` and ``context`` (arguments of all modules), ``app`` (middlewares,
then routers), ``errors`` (the form of errors), ``security`` and ``limits`` (the middlewares). Then
the routers; the generating ones share ``call``, ``sampling``, ``logprobs`` and ``sse``. ``run`` is
the process: signals, exit codes.

FastAPI is imported here only. Imported by the command line.
"""
