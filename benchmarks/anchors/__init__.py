"""The rows of ``benchmarks/anchors.py``, the processes that it times, and its page."""
