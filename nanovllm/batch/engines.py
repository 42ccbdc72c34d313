"""What serves a job's rows, and the engine in this process that does.

An engine has a window of rows that it works on, so that neither it nor the job's memory runs over.
"""

from typing import Any, Protocol

from nanovllm.batch.requests import Request
from nanovllm.engine.chat import TemplateOptions, chat_token_ids
from nanovllm.engine.results import completion_output, request_output
from nanovllm.engine.sequence import Sequence
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput

ROWS_PER_STEP = 128  # that are taken between two steps: reading more would leave the device idle
Answer = tuple[int, RequestOutput | str]  # a row's number, and its result or what was wrong


class Engine(Protocol):
    """Serves rows in any order."""

    @property
    def num_pending(self) -> int:
        """The rows that have been submitted and not yet returned."""
        ...

    def room(self) -> int:
        """Returns how many rows `submit` should be called with now."""
        ...

    def submit(self, index: int, request: Request) -> None: ...

    def poll(self) -> list[Answer]:
        """Works, or waits for others that do, and returns the rows that have ended."""
        ...

    def exit(self) -> None: ...


class LocalEngine(LLM):
    """An engine in this process."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        super().__init__(**keywords)
        self._rows: dict[int, int] = {}  # by the id of the request
        self._ended: list[Sequence] = []
        # By request and index, the samples of requests of which others still run.
        self._samples: dict[int, dict[int, CompletionOutput]] = {}
        self._refused: list[Answer] = []

    @property
    def window(self) -> int:
        """The most rows that it should have at a time."""
        return 2 * self.config.max_num_seqs

    @property
    def num_pending(self) -> int:
        return len(self._rows) + len(self._refused)

    def room(self) -> int:
        return min(self.window - self.num_pending, ROWS_PER_STEP)

    def submit(self, index: int, request: Request) -> None:
        try:
            self._check_sampling_params(request.sampling_params, "sampling_params")
            prompt = request.prompt
            if request.messages is not None:
                prompt = self._chat_token_ids(request)
            token_ids = self._prompts.token_ids(prompt, "prompt")
            seq = self._enqueue(token_ids, request.sampling_params, self._ended)
            self._rows[seq.request_id] = index
        except (TypeError, ValueError) as error:
            self._refused.append((index, str(error)))

    def poll(self) -> list[Answer]:
        answers, self._refused = self._refused, []
        if self._rows:
            self._step()
        for seq in self._ended:
            samples = self._samples.setdefault(seq.request_id, {})
            samples[seq.sample] = completion_output(seq, self._decoder)
            if len(samples) == seq.sampling_params.n:
                del self._samples[seq.request_id]
                output = request_output([samples[i] for i in sorted(samples)])
                answers.append((self._rows.pop(seq.request_id), output))
        self._ended.clear()
        return answers

    def _chat_token_ids(self, request: Request) -> list[int]:
        if request.tools and "tools" not in str(getattr(self.tokenizer, "chat_template", "")):
            raise ValueError(
                "the body has tools, and the checkpoint's chat template has no place for them; "
                'remove them, or pass "tool_choice": "none"'
            )
        options: TemplateOptions = {
            "chat_template": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": request.tools,
        }
        variables = request.chat_template_kwargs
        return chat_token_ids(request.messages, "messages", self.tokenizer, options, variables)
