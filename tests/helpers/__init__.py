"""Holds what tests share: checkpoints, references, engines, and the paths of the project."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
