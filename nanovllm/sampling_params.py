"""Per-request sampling knobs, checked at construction."""

from dataclasses import dataclass
from numbers import Real

MIN_TEMPERATURE = 1e-5  # logits / T stays far from the limits of fp32
MAX_TEMPERATURE = 1e30
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    temperature: >= 0; 0 takes the most likely token (greedy), ties to the lowest id.
    max_tokens: completion length at most, >= 1.
    ignore_eos: do not end at a stop token.
    seed: in [0, 2**64); None derives one from `Config.seed` and the request's number.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise TypeError(f"temperature must be a number, got {self.temperature!r}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # nor nan
            raise ValueError(
                f"temperature must be finite, at most {MAX_TEMPERATURE} and >= 0 (0 is greedy), "
                f"got {self.temperature}"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, "
                f"got {self.temperature}"
            )
        if not _is_int(self.max_tokens):
            raise TypeError(f"max_tokens must be an int, got {self.max_tokens!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.seed is not None:
            if not _is_int(self.seed):
                raise TypeError(f"seed must be an int or None, got {self.seed!r}")
            if not 0 <= self.seed <= MAX_SEED:
                raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
