"""Ahead-of-time compilation of Triton kernels, before their first launch.

Modules, in reading order: ``parallel_build`` (records launches, compiles in parallel),
``compile_pool`` (the client of the compile worker), ``compile_worker`` (a process with a pool of
forks), ``cache_keys`` (keys that do not depend on the order of compilation).

Signatures of kernels are sent as JSON, so kernels take no tuples as arguments. The runner and the
code that builds an engine may import this package.
"""
