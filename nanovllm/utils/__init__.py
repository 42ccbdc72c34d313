"""Helpers that know nothing of engine, models or layers."""
