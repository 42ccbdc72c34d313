"""Completes a Ray Dataset with two engines.

Run: python examples/ray_data.py    (pip install 'nanovllm[ray]')
"""

from pathlib import Path

import ray

from nanovllm.ray import generate

MODEL = Path(__file__).parents[1] / "demo" / "austen"
OPENINGS = ["She had", "Mr. Darcy", "It was", "Nothing could"]


def main() -> None:
    rows = [{"id": i, "prompt": OPENINGS[i % 4]} for i in range(16)]
    dataset = generate(
        ray.data.from_items(rows),
        model=str(MODEL),
        sampling_params={"temperature": 0.8, "max_tokens": 12},
        engine={"max_model_len": 512},
        concurrency=2,
        batch_size=8,
    )
    for row in sorted(dataset.take_all(), key=lambda row: row["id"]):
        print(row["id"], repr(row["prompt"] + row["text"]))


if __name__ == "__main__":
    main()
