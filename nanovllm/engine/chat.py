"""Turns conversations into prompts by the tokenizer's chat template."""

from collections.abc import Mapping
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase

from nanovllm.engine.prompts import check_text
from nanovllm.engine.tokenizer import encode
from nanovllm.utils.shown import cut, shown

Message = Mapping[str, Any]  # "role", "content", and whatever else the template knows
Conversation = list[Message]


class TemplateOptions(TypedDict):
    """What `apply_chat_template` of transformers takes of these names."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[Any] | None


def as_conversations(messages: Any) -> list[Any]:
    """Returns the conversations that `messages` holds, or is."""
    if not isinstance(messages, list | tuple):
        raise TypeError(
            "messages must be a conversation, which is a list of dicts with 'role' and 'content', "
            f"or a list of conversations, got {shown(messages)}"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def chat_token_ids(
    conversation: Any,
    what: str,
    tokenizer: PreTrainedTokenizerBase | None,
    options: TemplateOptions,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Returns the ids of a conversation as the template writes it; errors call it `what`.

    The template writes all special tokens, so the tokenizer adds none.
    """
    _check_conversation(conversation, what)
    if options["continue_final_message"] and options["add_generation_prompt"]:
        raise ValueError(
            "continue_final_message=True continues the last message, and add_generation_prompt="
            "True begins a new one; pass add_generation_prompt=False with the former"
        )
    if tokenizer is None:
        raise ValueError(
            "chat needs a tokenizer, and the checkpoint has none; pass token ids to generate"
        )
    if options["chat_template"] is None and tokenizer.chat_template is None:
        raise ValueError(
            "the checkpoint's tokenizer has no chat template; pass one as chat_template, or write "
            "the prompt yourself and pass it to generate"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(conversation), tokenize=False, **options, **template_kwargs
        )
    except Exception as error:  # a template may raise whatever Python raises
        raise ValueError(f"{what} does not suit the chat template: {cut(error)}") from error
    assert isinstance(text, str)
    check_text(text, what)
    return encode(tokenizer, text, what, add_special_tokens=False)


def _check_conversation(conversation: Any, what: str) -> None:
    if not isinstance(conversation, list | tuple):
        raise TypeError(
            f"{what} must be a list of dicts with 'role' and 'content', got {shown(conversation)}"
        )
    if not conversation:
        raise ValueError(f"{what} is empty; it needs at least one message")
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(
                f"{what} must be a list of dicts with 'role' and 'content', "
                f"got {shown(message)} at index {index}"
            )
