"""Tests completions of Ray Datasets on a local cluster of two nodes, and the loss of an actor."""

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from ray.cluster_utils import Cluster  # noqa: E402

from nanovllm.ray import generate  # noqa: E402
from tests.batch.jobs import read_rows, run_job, write_rows  # noqa: E402
from tests.helpers import ROOT  # noqa: E402
from tests.helpers.engines import greedy_ids, make_llm  # noqa: E402

PROMPTS = [[2 + i, 3 + i % 7, 5] for i in range(48)]
ENGINE = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "num_kvcache_blocks": 16}
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Starts two nodes of one CPU each, so that two engines are on different nodes."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[list[int]]:
    with make_llm(tiny_qwen3) as llm:
        return greedy_ids(llm, PROMPTS, 6)


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    return sorted(dataset.take_all(), key=lambda row: row["id"])


def numbered() -> Any:
    return ray.data.from_items([{"id": i, "prompt": p} for i, p in enumerate(PROMPTS)])


@pytest.mark.usefixtures("cluster")
def test_bad_rows_own_parameters_samples_and_logprobs(tiny_qwen3: Path) -> None:
    items: list[dict[str, Any]] = [
        {"id": 0, "prompt": [5, 6], "sampling_params": {"max_tokens": 2}},
        {"id": 1, "prompt": [9999], "sampling_params": {"max_tokens": None}},
        {"id": 2, "prompt": [5], "sampling_params": {"max_tokens": None}},
    ]
    params = {"n": 2, "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
    dataset = generate(ray.data.from_items(items), str(tiny_qwen3), params, ENGINE)
    first, bad, last = rows_of(dataset)
    assert [len(sample["token_ids"]) for sample in first["outputs"]] == [2, 2]
    assert [len(sample["token_ids"]) for sample in last["outputs"]] == [3, 3]
    assert len(last["logprobs"]) == 3
    assert "9999" in bad["error"]
    assert bad["token_ids"] is None


@pytest.mark.usefixtures("cluster")
def test_two_actors_give_what_one_engine_gives_though_one_is_killed(
    tiny_qwen3: Path, expected: list[list[int]]
) -> None:
    dataset = generate(numbered(), str(tiny_qwen3), GREEDY, ENGINE, concurrency=2, batch_size=4)
    pids: list[int] = []
    rows = []
    for row in dataset.iter_rows():
        rows.append(row)
        if len(rows) == 4:
            pids = engine_pids()
            os.kill(pids[0], signal.SIGKILL)
    assert len(pids) == 2
    assert "_Completions" in dataset.stats()
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert {row["error"] for row in rows} == {None}
    rows.sort(key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(len(PROMPTS)))
    assert [list(row["token_ids"]) for row in rows] == expected


def engine_pids() -> list[int]:
    """Returns the processes of actors that hold engines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"_Completions" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


@pytest.mark.usefixtures("cluster")
def test_a_job_on_ray_writes_what_one_engine_writes(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [{"id": i, "prompt": p} for i, p in enumerate(PROMPTS)]
    rows[7] = "{oops"
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_job(source, tmp_path / "here.jsonl", tiny_qwen3, "--max-tokens=4") == 0
    options = ("--max-tokens=4", "--ray", "--ray-batch-size=16", "--progress")
    assert run_job(source, tmp_path / "ray.jsonl", tiny_qwen3, *options) == 0
    assert read_rows(tmp_path / "ray.jsonl") == read_rows(tmp_path / "here.jsonl")
    assert "_LineCompletions" in capsys.readouterr().err, "Ray's statistics"


@pytest.mark.usefixtures("cluster")
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "ray_data.py"), run_name="__main__")
    assert capsys.readouterr().out.count("\n") == 16
