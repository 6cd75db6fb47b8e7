"""One model over several processes, and many engines over several machines.

One model: starts its processes, sends them the same steps, and detects a lost one. Modules, in
reading order: ``launch`` (rank 0's build), ``runner`` (rank 0's runner), ``channel`` (memory that
the ranks share), ``worker`` (the other ranks), ``workers`` (their processes, handled by rank 0),
``group`` (the collectives). Imports ``build`` and the packages that it imports. ``llm`` imports
this package.

Many engines, on Ray: ``replicas`` (a pool of actors, independent of models; imported by ``cli``)
and ``ray`` (the callable for Ray Data, which imports ``llm``).

``cleanup``: frees the memory of deleted engines.
"""

from .cleanup import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
