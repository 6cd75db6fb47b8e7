"""The engine for asyncio: many callers on event loops, one thread that steps.

Read in this order: ``async_llm`` (the public class), ``generation`` (one prompt being
answered), ``engine_thread`` (steps, and operations between them), ``host`` (what is served,
on that thread), ``served`` (what it shares with the loops), ``snapshot`` (the engine in numbers).
It stands on ``LLM``; ``server`` and the command line may import it.
"""
