"""One model over several processes, and many engines over several machines.

One model: starts its processes, sends them the same steps, detects a lost one. Read in this
order: ``launch`` (rank 0's build), ``runner`` (rank 0's runner), ``channel`` (what ranks share),
``worker`` (the other ranks), ``workers`` (their processes as rank 0 sees them), ``group`` (the
collectives). Imports ``build`` and all below. Imported by ``llm``.

Many engines, on Ray: ``replicas`` (a pool of actors, independent of models; imported by ``cli``)
and ``ray`` (the callable for Ray Data; stands above ``llm``).
"""
