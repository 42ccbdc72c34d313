"""Tests that README's figure is drawn from comparable results and refused for any others."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure


def h200_result(layers: int, hidden: int, *rates: float, **changes: Any) -> dict[str, Any]:
    return {
        "device_name": "NVIDIA H200",
        "options": figure.WORKLOAD | {"runs": len(rates)},
        "config": {"tensor_parallel_size": 1, "torch_dtype": "torch.bfloat16"},
        "shape": {"num_layers": layers, "hidden_size": hidden},
        "runs": [{"output_tokens_per_second": rate} for rate in rates],
    } | changes


def test_figure_draws_a_bar_each(tmp_path: Path) -> None:
    small = h200_result(
        28, 1024, 9e3, 25e3, 26e3, roofline={"floor_output_tokens_per_second": 35e3}
    )
    paths = [tmp_path / "small.json", tmp_path / "large.json"]
    paths[0].write_text(json.dumps(small))
    paths[1].write_text(json.dumps(h200_result(36, 2560, 13e3, 13.04e3)))
    out = tmp_path / "docs" / "figure.svg"
    figure.main([*map(str, paths), "--out", str(out)])
    root = ET.parse(out).getroot()
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    names = ["nano-vllm", "vLLM 0.24", "nanovllm", "hardware limit"]
    assert [text for text in texts if text in names] == names * 2
    assert "25.0k to 26.0k74% of the limit" in texts
    assert "13.0k74% of the limit" in texts, "without a floor of its own, the known one"
    assert "35.0k" in texts
    widths = [float(r.get("width", "")) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    bars = widths[1:8]  # without the background: high and low of each engine, then the limit
    assert bars[4] / bars[5] == pytest.approx(26 / 25, rel=1e-2)
    assert bars[6] == max(bars)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device_name": "a CPU"}, "measured on 'a CPU', the peers on an H200"),
        ({"options": figure.WORKLOAD | {"num_seqs": 8}}, "its workload is .*'num_seqs': 8"),
        ({"shape": {"num_layers": 2, "hidden_size": 64}}, r"\(2, 64\); known: "),
        ({"runs": [{"output_tokens_per_second": 1}]}, "one run.*--runs 2"),
        ({"config": {"tensor_parallel_size": 2, "torch_dtype": "torch.bfloat16"}}, r"\(2, 'torch"),
    ],
)
def test_figure_refuses_what_does_not_compare(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(h200_result(28, 1024, 1e3, 2e3) | changes))
    with pytest.raises(SystemExit, match=f"^error: {path}: .*{why}"):
        figure.main([str(path), "--out", str(tmp_path / "figure.svg")])
    assert not (tmp_path / "figure.svg").exists()
