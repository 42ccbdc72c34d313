"""Tests whole jobs: order, parameters of rows, bad rows, formats."""

import random
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.batch import options
from nanovllm.batch.files import LineFile
from nanovllm.config import Config
from tests.batch.jobs import read_rows, run_job, write_rows
from tests.helpers.checkpoints import edit_json
from tests.helpers.engines import make_llm

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(2, 512) for _ in range(RNG.randint(1, 40))] for _ in range(30)]
GREEDY = "--temperature=0"
TOOL = {"type": "function", "function": {"name": "primes", "description": "", "parameters": {}}}


def plain_rows() -> list[dict[str, Any]]:
    return [
        {"id": i, "prompt": prompt, "sampling_params": {"max_tokens": 1 + i % 9}}
        for i, prompt in enumerate(PROMPTS)
    ]


def test_rows_get_what_generate_gives(tmp_path: Path, tiny_qwen3: Path) -> None:
    rows = plain_rows()
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, GREEDY) == 0
    params = [SamplingParams(temperature=0, **row["sampling_params"]) for row in rows]
    with make_llm(tiny_qwen3) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
    names = ("text", "token_ids", "finish_reason")
    assert read_rows(tmp_path / "out.jsonl") == [
        row | {name: dict(output)[name] for name in names}
        for row, output in zip(rows, expected, strict=True)
    ]


def test_engines_that_share_the_rows_give_the_same(tmp_path: Path, tiny_qwen3: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", plain_rows())
    assert run_job(source, tmp_path / "one.jsonl", tiny_qwen3) == 0  # sampled, by row's number
    assert run_job(source, tmp_path / "two.jsonl", tiny_qwen3, "--data-parallel-size=2") == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_bad_rows_get_their_reason(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[Any] = [
        "{oops",
        "[1]",
        {"id": 1},
        {"prompt": []},
        {"prompt": [512]},
        {"prompt": [5] * 200},
        {"prompt": 7},
        {"prompt": "x \ud83d"},
        {"prompt": [5], "messages": [{"role": "user", "content": "x"}]},
        {"prompt": [5], "sampling_params": {"temprature": 1}},
        {"prompt": [5], "sampling_params": {"temperature": -1}},
        {"prompt": [5], "sampling_params": 3},
        {"messages": []},
        {"messages": "hello"},
        {"prompt": [5], "text": "mine"},
    ]
    good = {"prompt": [5, 6], "sampling_params": {"max_tokens": 2}}
    source = write_rows(tmp_path / "in.jsonl", [good, *bad, good])
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, GREEDY) == 0
    first, *errors, last = read_rows(tmp_path / "out.jsonl")
    assert first == last
    assert len(first["token_ids"]) == 2
    for row, result in zip(bad, errors, strict=True):
        assert result.keys() == {"error"} | (row.keys() if isinstance(row, dict) else set())
    reasons = [result["error"] for result in errors]
    assert "did you mean 'temperature'" in reasons[9]
    assert all(reasons)
    assert f"17 rows, {len(bad)} errors" in capsys.readouterr().out


def test_bad_rows_among_many_cost_only_themselves(tmp_path: Path, tiny_qwen3: Path) -> None:
    rng = random.Random(3)
    bad = [
        "{oops",
        "[" * 5000,
        "null",
        "\x00",
        '{"prompt": []}',
        '{"prompt": [1e400]}',
        '{"id": 0}',
    ]
    rows: list[Any] = [{"id": i, "prompt": [2 + i % 500, 3]} for i in range(500)]
    places = sorted(rng.sample(range(500), 35))
    for place in places:
        rows[place] = bad[place % len(bad)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    good = [row for row in rows if isinstance(row, dict)]
    output, alone = tmp_path / "out.jsonl", tmp_path / "good.jsonl"
    options = ("--max-tokens=2", GREEDY)
    assert run_job(source, output, tiny_qwen3, *options) == 0
    assert run_job(write_rows(tmp_path / "in2.jsonl", good), alone, tiny_qwen3, *options) == 0
    results = read_rows(output)
    assert [i for i, row in enumerate(results) if row.get("error")] == places
    assert [row for row in results if "error" not in row] == read_rows(alone)


def test_too_many_errors_stop_the_job(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [{"prompt": [5]}, "{", "{", {"prompt": [6]}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    options = ("--max-tokens=2", GREEDY)
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, *options, "--max-errors=1") == 1
    assert "2 rows have failed" in capsys.readouterr().err
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, *options, "--max-errors=2") == 0
    assert [("error" in row) for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 1, 0]


def test_other_columns_and_prefix(tmp_path: Path, tiny_qwen3: Path) -> None:
    rows = [{"text": "introduce yourself", "prompt": "a", "messages": "b"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, "--prompt-column=text") == 2
    options = ("--prompt-column=text", "--result-prefix=my_", "--max-tokens=3")
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, *options) == 0
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert row.keys() == {*rows[0], "my_text", "my_token_ids", "my_finish_reason"}


def test_conversations(tmp_path: Path, tiny_qwen3: Path) -> None:
    messages = [{"role": "user", "content": "introduce yourself"}]
    source = write_rows(tmp_path / "in.jsonl", [{"messages": messages}])
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, GREEDY, "--max-tokens=5") == 0
    with make_llm(tiny_qwen3) as llm:
        expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert read_rows(tmp_path / "out.jsonl")[0]["token_ids"] == expected[0]["token_ids"]


def test_samples_and_logprobs_come_along(tmp_path: Path, tiny_qwen3: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": [5, 6, 7]}])
    options = ("--n=2", "--max-tokens=3", "--logprobs=1", "--prompt-logprobs=0")
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3, *options) == 0
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert len(row["outputs"]) == 2
    assert row["outputs"][0]["token_ids"] == row["token_ids"]
    assert len(row["logprobs"]) == 3
    assert len(row["prompt_logprobs"]) == 3


def test_a_finished_job_is_not_done_again(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": [5]}, {"prompt": [6]}])
    output = tmp_path / "out.jsonl"
    assert run_job(source, output, tiny_qwen3, "--max-tokens=2") == 0
    before = output.stat().st_mtime_ns
    assert run_job(source, output, tiny_qwen3, "--max-tokens=2") == 0
    assert "0 rows (2 were there before)" in capsys.readouterr().out
    assert output.stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_strange_output_is_not_touched(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": [5]}, {"prompt": [6]}])
    output = write_rows(tmp_path / "out.jsonl", [{"mine": 1}])
    assert run_job(source, output, tiny_qwen3, "--max-tokens=2") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert read_rows(output) == [{"mine": 1}]
    assert run_job(source, output, tiny_qwen3, "--max-tokens=2", "--overwrite") == 0
    assert len(read_rows(output)) == 2


def test_a_job_is_resumed_with_its_own_options_only(
    tmp_path: Path,
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": [i]} for i in range(2, 30)])
    output = tmp_path / "out.jsonl"
    append, num_calls = LineFile.append, 0

    def interrupted(self: LineFile, lines: list[bytes]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        append(self, lines)

    monkeypatch.setattr(LineFile, "append", interrupted)
    options = ("--max-tokens=3", GREEDY)
    assert run_job(source, output, tiny_qwen3, *options) == 130
    num_done = len(read_rows(output))
    assert 0 < num_done < 28
    assert run_job(source, output, tiny_qwen3, "--max-tokens=4", GREEDY) == 2
    assert "was begun with sampling=" in capsys.readouterr().err
    assert run_job(source, output, tiny_qwen3, *options) == 0
    assert f"{28 - num_done} rows ({num_done} were there before)" in capsys.readouterr().out
    assert run_job(source, tmp_path / "undisturbed.jsonl", tiny_qwen3, *options) == 0
    assert output.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "temperature must be"),
        (["--max-tokens=x"], "invalid int value"),
        (["--seed=-1"], "must be in"),
        (["--data-parallel-size=0"], "must be in"),
        (["--temprature=1"], "unrecognized arguments"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path,
    tiny_qwen3: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": [5]}])
    with pytest.raises(SystemExit) as exit_info:
        run_job(source, tmp_path / "out.jsonl", tiny_qwen3, *options)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_keyword_with_its_default_and_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        options.parse(["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split("positional arguments")[1].split())
    for cls in (Config, SamplingParams):
        for field in fields(cls):
            if field.init and field.name not in ("seed", "model"):
                shown = "none" if field.default in (None, ()) else str(field.default)
                flag = "--" + field.name.replace("_", "-")
                assert re.search(rf"{flag}[ ,][^=]*?default: {re.escape(shown)}(?= |$)", text), flag
    assert re.search(r"Exit codes: 0 .*, 1 .*, 2 .*, 130 ", text)


def test_parquet_in_and_out(tmp_path: Path, tiny_qwen3: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = plain_rows()
    table = pa.Table.from_pylist(rows).append_column("weight", pa.array(range(30), pa.float32()))
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3) == 0
    assert run_job(tmp_path / "in.parquet", tmp_path / "out.parquet", tiny_qwen3) == 0
    result = pq.read_table(tmp_path / "out.parquet")
    assert result.schema.field("weight").type == pa.float32()
    assert result.drop_columns("weight").to_pylist() == read_rows(tmp_path / "out.jsonl")
    assert run_job(source, tmp_path / "mixed.parquet", tiny_qwen3) == 0
    assert pq.read_table(tmp_path / "mixed.parquet").to_pylist() == read_rows(
        tmp_path / "out.jsonl"
    )
    assert not list(tmp_path.glob("*.results.jsonl"))


def test_parquet_rows_from_any_start(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from nanovllm.batch.parquet import ParquetRows

    pq.write_table(pa.table({"a": range(20)}), tmp_path / "in.parquet", row_group_size=6)
    source = ParquetRows(tmp_path / "in.parquet")
    for start in range(21):
        assert [row["a"] for row in source.rows(start)] == list(range(start, 20))


def test_columns_of_several_types_are_refused_with_results_kept(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"prompt": [5], "x": 1}, {"prompt": [5], "x": "one"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run_job(source, tmp_path / "out.parquet", tiny_qwen3, "--max-tokens=2") == 2
    assert "results are in" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "out.parquet.results.jsonl")) == 2


def test_openai_batch_file(tmp_path: Path, tiny_qwen3: Path) -> None:
    messages = [{"role": "user", "content": "introduce yourself"}]
    chat = {"model": "m", "messages": messages, "max_completion_tokens": 4, "temperature": 0}
    text = {"model": "m", "prompt": "list all", "max_tokens": 3, "logprobs": 2, "temperature": 0}
    bodies = [
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", text),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/chat/completions", chat | {"temperature": 1.0, "n": 2, "logit_bias": {"5": -100}}),
        ("/v1/chat/completions", chat | {"tools": [TOOL]}),
        ("/v1/chat/completions", chat | {"tools": [TOOL], "tool_choice": "none"}),
        ("/v1/chat/completions", chat | {"tools": [TOOL], "tool_choice": "required"}),
    ]
    lines = [
        {"custom_id": f"request-{i}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(bodies)
    ]
    source = write_rows(tmp_path / "in.jsonl", lines)
    assert run_job(source, tmp_path / "out.jsonl", tiny_qwen3) == 0
    results = read_rows(tmp_path / "out.jsonl")
    assert [r["custom_id"] for r in results] == [f"request-{i}" for i in range(8)]
    codes = [200, 200, 400, 400, 200, 400, 200, 400]
    assert [r["response"]["status_code"] for r in results] == codes
    assert all(r.keys() == {"id", "custom_id", "response", "error"} for r in results)
    body = results[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["logprobs"]["content"])
    with make_llm(tiny_qwen3) as llm:
        (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), False)
    assert body["choices"][0]["message"]["content"] == expected["text"]
    assert body["usage"]["prompt_tokens"] == len(expected["prompt_token_ids"])
    body = results[1]["response"]["body"]
    assert body["object"] == "text_completion"
    assert "".join(body["choices"][0]["logprobs"]["tokens"]) == body["choices"][0]["text"]
    assert "stream=True" in results[2]["error"]["message"]
    assert [choice["index"] for choice in results[4]["response"]["body"]["choices"]] == [0, 1]
    assert "no place for them" in results[5]["error"]["message"]
    assert "tool_choice='required'" in results[7]["error"]["message"]


def test_tools_are_written_by_the_template_and_calls_come_as_text(
    tmp_path: Path, tiny_qwen3: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_qwen3, model)
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}introduce yourself"
    (model / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(model / "tokenizer_config.json", chat_template=template)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body | more}
        for i, more in enumerate([{}, {"tools": [TOOL], "parallel_tool_calls": False}])
    ]
    source = write_rows(tmp_path / "in.jsonl", lines)
    assert run_job(source, tmp_path / "out.jsonl", model) == 0
    plain, tools = (row["response"]["body"] for row in read_rows(tmp_path / "out.jsonl"))
    assert tools["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert tools["choices"][0]["message"].keys() == {"role", "content"}
