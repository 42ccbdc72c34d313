"""Tests the soak script: a short run, and that it finds what grows or slows down."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import NUM_LINES, Soak, State, findings, large_calls


def test_rounds_and_large_calls(
    tiny_qwen3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "NUM_LINES", 1)
    work = Soak(str(tiny_qwen3), "cpu")
    (state,) = soak.run(work, 0.0)
    assert state.rounds == 1
    assert state.tokens_per_second > 0
    assert work.llm.metrics()["preemptions"] > 0
    requests = work.llm.metrics()["requests"]
    assert requests["aborted"] > 0
    assert requests["running"] == requests["waiting"] == requests["failed"] == 0
    large_calls(work, scale=0.002)
    assert "140 requests, 140 resident" in capsys.readouterr().out


def test_findings() -> None:
    state = State(1.0, 1, 100.0, 500.0, 0.0, 6, 2, 300_000)
    flat = [replace(state, tokens_per_second=100.0 + i % 3) for i in range(NUM_LINES)]
    assert findings(flat) == []
    for name, step, word in (
        ("rss_mib", 10.0, "rss_mib has grown by 100.0"),
        ("num_files", 1, "num_files has grown by 10.0"),
        ("num_objects", 500, "num_objects has grown"),
    ):
        growing = [replace(s, **{name: getattr(s, name) + i * step}) for i, s in enumerate(flat)]
        assert any(word in found for found in findings(growing))
    slower = [replace(s, tokens_per_second=100.0 * 0.96**i) for i, s in enumerate(flat)]
    assert "the speed is 0." in findings(slower)[0]
