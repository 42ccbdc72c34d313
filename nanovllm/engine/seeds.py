"""Seeds: of requests, and of the samples of one request."""

import xxhash


def sample_seed(seed: int, sample: int) -> int:
    """Returns the seed with which a request of its own gives sample `sample` of a request that has
    this seed and n > sample.

    That of sample 0 is `seed` itself; the others are 64-bit hashes of both numbers.
    """
    return seed if sample == 0 else _hash(seed, sample)


def request_seed(own: int | None, engine_seed: int, number: int) -> int:
    """Returns 64 bits that key a request's sampling noise.

    They depend on the request's own seed, or without one on the engine's and the request's number.
    """
    return _hash(engine_seed, number) if own is None else _hash(own)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return xxhash.xxh64_intdigest(data)
