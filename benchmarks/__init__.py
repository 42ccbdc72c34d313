"""Parts of bench.py, and scripts that measure what it does not."""
