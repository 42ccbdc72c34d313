"""Helpers that know nothing of the engine, the models or the layers."""
