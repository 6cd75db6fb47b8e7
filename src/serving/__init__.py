"""The engine for asyncio: many callers on event loops, one thread that steps.

Read in this order: ``async_llm`` (the public class), ``generation`` (one prompt being
answered), ``engine_thread`` (steps, and operations between them), ``host`` (the live requests,
on that thread), ``served`` (requests shared with the loops), ``snapshot`` (counts of the engine).
It stands on ``LLM``; ``server`` and the command line may import it.
"""
