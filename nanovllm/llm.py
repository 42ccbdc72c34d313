"""What a user calls: a batch of prompts goes in, ordered results come out."""

from collections.abc import Generator
from typing import Any

from nanovllm.engine.chat import Conversation, TemplateOptions, as_conversations, chat_token_ids
from nanovllm.engine.interrupts import deferred_interrupt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.numerical_error import NumericalError
from nanovllm.engine.progress import Progress
from nanovllm.engine.prompts import Prompt, as_batch
from nanovllm.engine.requests import Checked
from nanovllm.engine.results import completion_output, request_output
from nanovllm.engine.seeds import sample_seed
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.streaming import StreamedRequest
from nanovllm.engine.turns import Caller
from nanovllm.outputs import CompletionOutput, RequestOutput, StreamOutput
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "NumericalError", "sample_seed"]

Params = SamplingParams | list[SamplingParams] | None
Prompts = Prompt | list[str] | list[list[int]] | list[Prompt] | tuple[Prompt, ...]


class LLM(LLMEngine):
    """A model that is ready to generate.

    `LLM(model, **config)` takes a local checkpoint directory and the fields of `Config`. `exit()`
    frees everything, and so does leaving a `with` block.
    """

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.exit()

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Completes each prompt and returns the results in the order of the prompts.

        prompts: a list of prompts, or one. A prompt is a text; token ids, as a list, a tuple, a
            NumPy array or a torch tensor; or `{"prompt": text}` or `{"prompt_token_ids": ids}`.
        sampling_params: one object for all prompts, or a list of the same length; None takes the
            defaults.

        All prompts are checked before any is queued: `TypeError` and `ValueError` name the index of
        the prompt. If a step raises, this call's requests are aborted; the engine stays usable, but
        not with several ranks. Ctrl-C takes effect between two steps and aborts them as well.
        Requests that `add_request` queued before are served along; `step` returns their results.

        Raises `NumericalError`, once all others have ended, if the logits of a request were NaN or
        infinite; its `outputs` are all results.
        """
        return self._generate(self._checked(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers each conversation; the results are those of `generate`.

        messages: a conversation, which is a list of `{"role": ..., "content": ...}`, or a list of
            conversations.
        chat_template: a Jinja template instead of the tokenizer's.
        add_generation_prompt: the template begins the answer after the last message.
        continue_final_message: the completion continues the last message instead; it needs
            `add_generation_prompt=False`.
        tools: functions, or JSON schemas of functions, that the template describes to the model.
        chat_template_kwargs: further variables of the template.

        Raises `ValueError` without a template, or if a conversation does not suit it.
        """
        options: TemplateOptions = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        variables = chat_template_kwargs or {}
        prompts: list[Prompt] = [
            chat_token_ids(conversation, f"conversation {i}", self.tokenizer, options, variables)
            for i, conversation in enumerate(as_conversations(messages))
        ]
        return self._generate(self._checked(prompts, sampling_params), use_tqdm)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None
    ) -> Generator[StreamOutput, None, None]:
        """Completes prompts, and yields what each step adds to each completion.

        The arguments are those of `generate` and are checked at once; the requests are queued when
        the first item is asked for. Joined, the items of a completion have exactly the text and the
        ids of `generate`'s result. Text lags behind the ids where it is not certain yet: within a
        character, or where a stop string may have begun. Closing the iterator aborts the rest.
        Meanwhile other calls may use the engine; steps serve the requests of all.

        A completion whose logits are NaN or infinite ends with the finish reason "abort"; then,
        after the last item, `NumericalError` is raised.
        """
        return self._stream(self._checked(prompts, sampling_params))

    def _checked(self, prompts: Any, sampling_params: Any) -> Checked:
        """Returns the requests of a call, once all of them have been found to be good."""
        self._check_open()
        batch = as_batch(prompts)
        params = self._params_for_each(sampling_params, len(batch))
        token_ids = [self._prompts.token_ids(p, f"prompt {i}") for i, p in enumerate(batch)]
        return list(zip(token_ids, params, strict=True))

    def _params_for_each(self, given: Any, num_prompts: int) -> list[SamplingParams]:
        params: list[SamplingParams] = given
        if not isinstance(given, list):
            params = [SamplingParams() if given is None else given] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(
                f"{len(params)} sampling_params for {num_prompts} prompts; give one object, or one "
                "each"
            )
        checked: object = None
        for index, item in enumerate(params):
            if item is not checked:  # most calls have one object for all
                self._check_sampling_params(item, f"sampling_params {index}")
            checked = item
        return params

    def _generate(self, requests: Checked, use_tqdm: bool) -> list[RequestOutput]:
        caller = Caller()
        outputs: dict[int, CompletionOutput] = {}
        try:
            with deferred_interrupt() as raise_if_interrupted:
                self._visit(lambda: self._requests.queue(requests, caller.ended, caller.firsts))
                num_samples = sum(params.n for _, params in requests)
                with Progress(len(requests), use_tqdm) as progress:
                    while len(outputs) < num_samples:
                        batch = self._advance(caller)
                        ended = caller.take_ended()
                        for seq in ended:  # while the device works
                            outputs[seq.seq_id] = self._output(seq)
                        progress.update(batch, ended)
                        raise_if_interrupted()
        except BaseException:
            self._drop(caller)
            raise
        finally:
            self._turns.leave(caller)
        firsts = caller.firsts
        results = [request_output([outputs[i] for i in _ids_of_samples(seq)]) for seq in firsts]
        errors = {
            f"prompt {i}": sample["error"]
            for i, result in enumerate(results)
            for sample in result.get("outputs", [result])
            if "error" in sample
        }
        if errors:
            raise NumericalError(errors, results)
        return results

    def _stream(self, requests: Checked) -> Generator[StreamOutput, None, None]:
        self._check_open()
        caller = Caller(wants_all_steps=True)
        try:
            self._visit(lambda: self._requests.queue(requests, caller.ended, caller.firsts))
            streamed = [
                StreamedRequest(i, seq, self._decoder) for i, seq in enumerate(caller.firsts)
            ]
            while streamed:
                self._turns.check()
                # Others' steps count as well, and may even have ended all.
                self._turns.look(caller)
                deltas = [delta for request in streamed for delta in request.deltas()]
                streamed = [request for request in streamed if not request.has_ended]
                if deltas:
                    self._turns.leave(caller)  # who knows when the next item is asked for
                    yield from deltas
                elif streamed:
                    with deferred_interrupt():
                        self._advance(caller)
            errors = {
                f"prompt {i}": seq.error
                for i, first in enumerate(caller.firsts)
                for seq in (first, *first.others)
                if seq.error is not None
            }
            if errors:
                raise NumericalError(errors)
        finally:
            self._drop(caller)
            self._turns.leave(caller)

    def _output(self, seq: Sequence) -> CompletionOutput:
        if seq.finish_reason == "abort" and seq.error is None:
            self._check_open()  # exit() aborts all
            raise RuntimeError(f"request {seq.request_id} of this call has been aborted")
        return completion_output(seq, self._decoder)

    def _drop(self, caller: Caller) -> None:
        """Aborts those requests of a call that have not ended."""
        self._abort(i for first in caller.firsts for i in _ids_of_samples(first))


def _ids_of_samples(first: Sequence) -> range:
    return range(first.seq_id, first.seq_id + first.sampling_params.n)
