"""The HTTP server: OpenAI's API, and vLLM's additions to it, over one ``AsyncLLM``.

Reading order: ``config`` and ``context`` (arguments of all modules), ``app`` (middlewares, then
routers), ``errors`` (error responses), ``security`` and ``limits`` (the middlewares). Then the
routers; the generating ones share ``call``, ``sampling``, ``logprob_fields`` and ``sse``. ``run``
is the process: signals, exit codes.

FastAPI is imported only in this package. The command line imports the package.
"""
