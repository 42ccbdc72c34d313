"""Tests that conversations become the ids that the chat template says, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from nanovllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import GREEDY, make_paged_llm

USER = {"role": "user", "content": "list all"}
ANSWER = {"role": "assistant", "content": "prime"}
TOOLS_TEMPLATE = (
    "{{ bos }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ mark }}{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


def prompt_text(llm: LLM, *args: Any, **kwargs: Any) -> str:
    (output,) = llm.chat(*args, GREEDY, use_tqdm=False, **kwargs)
    assert llm.tokenizer is not None
    return str(llm.tokenizer.decode(output["prompt_token_ids"]))


def test_results_are_those_of_generate(llm: LLM) -> None:
    rendered = ["<|im_start|>user\nlist all<|im_end|>\n<|im_start|>assistant\n"]
    rendered.append(rendered[0] + "prime<|im_end|>\n" + rendered[0])
    conversations = [[USER], [USER, ANSWER, USER]]
    expected = llm.generate(rendered, GREEDY, use_tqdm=False)
    assert llm.chat(conversations, GREEDY, use_tqdm=False) == expected
    assert llm.chat(conversations[0], GREEDY, False) == expected[:1]
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=2)]
    assert len(llm.chat(conversations, params, use_tqdm=False)[1]["token_ids"]) <= 2
    assert llm.chat([]) == []


def test_the_last_message_is_continued(llm: LLM) -> None:
    text = prompt_text(
        llm, [USER, ANSWER], add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<|im_start|>user\nlist all<|im_end|>\n<|im_start|>assistant\nprime"
    text = prompt_text(llm, [USER], add_generation_prompt=False)
    assert text == "<|im_start|>user\nlist all<|im_end|>\n"
    with pytest.raises(ValueError, match=r"pass add_generation_prompt=False"):
        llm.chat([USER, ANSWER], continue_final_message=True)


def test_own_template_tools_and_variables(llm: LLM) -> None:
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    schema = {"type": "function", "function": {"name": "times", "parameters": {}}}
    text = prompt_text(
        llm,
        [USER],
        chat_template=TOOLS_TEMPLATE,
        tools=[add, schema],
        chat_template_kwargs={"mark": "!"},
    )
    assert text == "[add][times]user: list all\nassistant!"


@pytest.mark.parametrize("writes_bos", [True, False])
def test_the_template_alone_writes_special_tokens(tiny_qwen3: Path, writes_bos: bool) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm.tokenizer is not None
    llm.tokenizer.bos_token = "<|im_start|>"
    llm.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    template = "{{ bos_token }}" * writes_bos + "{{ messages[0].content }}"
    (output,) = llm.chat([USER], GREEDY, use_tqdm=False, chat_template=template)
    assert output["prompt_token_ids"].count(0) == writes_bos


def test_without_template_or_tokenizer(tiny_qwen3: Path, tmp_path: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; pass one as chat_template"):
        llm.chat([USER])
    bare = make_paged_llm(make_checkpoint(tmp_path, with_tokenizer=False))
    with pytest.raises(ValueError, match=r"needs a tokenizer.*pass token ids to generate"):
        bare.chat([USER])


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("hello", TypeError, r"^messages must be .*got 'hello'"),
    "one message": (USER, TypeError, r"^messages must be .*got {'role'"),
    "texts": (["hello"], TypeError, r"^conversation 0 must be .*got 'hello'"),
    "no messages": ([[USER], []], ValueError, r"^conversation 1 is empty"),
    "text among messages": (
        [USER, "hello"],
        TypeError,
        r"^conversation 0 .*got 'hello' at index 1",
    ),
    "no role": ([[USER], [{"content": "a"}]], TypeError, r"^conversation 1 .*at index 0"),
    "surrogate": ([{"role": "user", "content": "\ud83d"}], ValueError, r"^conversation 0 has "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages(llm: LLM, case: str) -> None:
    messages, error, pattern = BAD[case]
    with pytest.raises(error, match=pattern):
        llm.chat(messages, GREEDY)
    assert llm.is_finished()


def test_a_template_that_refuses_a_conversation_or_is_no_template(llm: LLM) -> None:
    refusing = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}a"
    conversations = [[USER], [{"role": "tool", "content": "a"}]]
    with pytest.raises(ValueError, match=r"^conversation 1 does not suit .*: no tools"):
        llm.chat(conversations, GREEDY, chat_template=refusing)
    with pytest.raises(ValueError, match=r"^conversation 0 does not suit the chat template"):
        llm.chat([USER], GREEDY, chat_template="{% if %}")
    assert llm.is_finished()
