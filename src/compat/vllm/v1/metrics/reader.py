"""vLLM's classes of ``LLM.get_metrics``."""

from pagespec.engine.metric_values import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
