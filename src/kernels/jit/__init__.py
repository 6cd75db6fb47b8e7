"""How Triton's kernels are compiled ahead of their first launch.

Read in this order: ``parallel_build`` (records launches, compiles in parallel), ``compile_pool``
(the client of the compile worker), ``compile_worker`` (a process with a pool of forks),
``cache_keys`` (keys that do not depend on the order of compilation).

Forms of kernels travel as JSON, so kernels take no tuples as arguments. May be imported by the
runner and by what builds an engine.
"""
