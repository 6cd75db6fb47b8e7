"""Names of vLLM, so that a program is ported by changing its import lines.

``vllm`` has a module for each public module of vLLM; each imports the names from their homes.
``pagespec.__path__`` has its folder as a second entry, so that ``pagespec.sampling_params`` is
found as well. The rest are the homes of names that only vLLM has: ``arguments`` (``EngineArgs``),
``parser`` (``FlexibleArgumentParser``), ``configs``, ``prompts``, ``refused`` and ``helpers``.
"""
