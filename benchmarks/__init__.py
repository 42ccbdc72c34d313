"""Modules of bench.py, and scripts that measure what it leaves out."""
