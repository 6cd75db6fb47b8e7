"""asyncio interface of the engine: many callers on event loops, one thread that steps.

Reading order: ``async_llm`` (the public class), ``generation`` (a submitted prompt),
``engine_thread`` (steps, and operations between them), ``host`` (the live requests, on that
thread), ``served`` (requests shared with the event loops), ``snapshot`` (counts of the engine's
state). The package builds on ``LLM``; ``server`` and the command line may import it.
"""
