"""Tests what ends a completion besides its length: stop strings and stop token ids."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import Ids, make_paged_llm, script

SCRIPT = "one stop, two stops ééé 🙂 end"
PROMPT = [5, 6, 7]
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["late", "at once"])
def llm(request: pytest.FixtureRequest, tiny_qwen3: Path) -> LLM:
    llm = make_paged_llm(tiny_qwen3, async_scheduling=request.param)
    script(llm, [*token_ids(llm), 1], len(PROMPT))
    return llm


def token_ids(llm: LLM) -> Ids:
    assert llm.tokenizer is not None
    return list(llm.tokenizer.encode(SCRIPT))


def complete(llm: LLM, params: SamplingParams = FREE, **changes: Any) -> RequestOutput:
    (output,) = llm.generate([PROMPT], replace(params, **changes), use_tqdm=False)
    return output


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("stop", "one "),
        (["two", "end"], "one stop, "),
        ("stops", "one stop, two "),
        ([", t", "stop,"], "one "),
        ("éé", "one stop, two stops "),
        ("🙂", "one stop, two stops ééé "),
        ("o", ""),
        (SCRIPT, ""),
    ],
)
def test_text_ends_at_the_stop_string(llm: LLM, stop: str | list[str], text: str) -> None:
    output = complete(llm, stop=stop)
    found = output["stop_reason"]
    assert isinstance(found, str)
    assert found in ([stop] if isinstance(stop, str) else stop)
    assert (output["text"], output["finish_reason"]) == (text, "stop")
    assert complete(llm, stop=stop, include_stop_str_in_output=True)["text"] == text + found
    # The ids go up to the token that completed it.
    assert llm.tokenizer is not None
    ids = output["token_ids"]
    assert ids == token_ids(llm)[: len(ids)]
    whole, before = (llm.tokenizer.decode(part) for part in (ids, ids[:-1]))
    assert text + found in whole
    assert text + found not in before
    assert llm.is_finished()


def test_min_tokens_holds_for_every_kind_of_stop(llm: LLM) -> None:
    num = len(complete(llm, stop="stop")["token_ids"])
    assert complete(llm, stop="stop", min_tokens=num)["text"] == "one "
    # What an earlier token completed never counts, what begins later does.
    assert complete(llm, stop="stop", min_tokens=num + 1)["text"] == "one stop, two "


def test_stop_token_ids_count_with_ignore_eos(llm: LLM) -> None:
    ids = token_ids(llm)
    output = complete(llm, stop_token_ids=[ids[3], 400])
    assert output["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", ids[3])
    assert llm.tokenizer is not None
    assert output["text"] == llm.tokenizer.decode(output["token_ids"])


def test_eos_has_no_stop_reason_and_length_neither(llm: LLM) -> None:
    output = complete(llm, ignore_eos=False)
    assert (output["token_ids"][-1], output["finish_reason"], output["stop_reason"]) == (
        1, "stop", None
    )  # fmt: skip
    assert output["text"] == SCRIPT + "<|im_end|>"
    assert complete(llm, ignore_eos=False, skip_special_tokens=True)["text"] == SCRIPT
    output = complete(llm, stop="nowhere", max_tokens=3)
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
    assert output["text"] == complete(llm, max_tokens=3)["text"]


def test_a_stop_string_in_the_last_token_wins_over_eos_and_length(llm: LLM) -> None:
    output = complete(llm, ignore_eos=False, stop="<|im_end|>")
    assert (output["text"], output["stop_reason"]) == (SCRIPT, "<|im_end|>")
    num = len(complete(llm, stop="stop")["token_ids"])
    assert complete(llm, stop="stop", max_tokens=num)["finish_reason"] == "stop"


def test_a_skipped_special_token_is_no_text_to_stop_at(llm: LLM) -> None:
    output = complete(llm, ignore_eos=False, stop="<|im_end|>", skip_special_tokens=True)
    assert (output["text"], output["stop_reason"]) == (SCRIPT, None)


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    output = complete(llm, ignore_eos=False, detokenize=False)
    assert (output["text"], output["finish_reason"]) == ("", "stop")
    assert output["token_ids"] == [*token_ids(llm), 1]


def test_only_stop_strings_are_detokenized_in_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm._decoder is not None
    made: list[bool] = []
    make = llm._decoder.detokenizer
    monkeypatch.setattr(llm._decoder, "detokenizer", lambda skip: made.append(skip) or make(skip))
    complete(llm)
    assert made == []
    complete(llm, stop="stop")
    assert made == [False]


def test_stop_strings_and_preemption(tiny_qwen3: Path) -> None:
    def outputs(num_blocks: int) -> tuple[list[RequestOutput], int]:
        llm = make_paged_llm(tiny_qwen3, num_kvcache_blocks=num_blocks)
        llm.scheduler.reserved_tokens = 0  # which saves most preemptions
        script(llm, token_ids(llm), len(PROMPT))
        stops = ["stop", "end", " é", "two", "nowhere", "🙂"]
        params = [replace(FREE, stop=stop, max_tokens=30) for stop in stops]
        return llm.generate([PROMPT] * 6, params, use_tqdm=False), llm.scheduler.num_preemptions

    (expected, _), (tight, num_preemptions) = outputs(128), outputs(17)
    assert tight == expected
    assert num_preemptions > 0


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    bare = make_paged_llm(make_checkpoint(tmp_path, with_tokenizer=False))
    with pytest.raises(ValueError, match=r"^sampling_params 0: stop strings .* no tokenizer"):
        bare.generate([PROMPT], SamplingParams(stop="a"), use_tqdm=False)
