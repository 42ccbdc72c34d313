"""Tests that a forked child cannot use its parent's engine, and that nothing of the parent's ends
with the child."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.outputs import StreamOutput
from tests.helpers.engines import GREEDY, joined, make_llm
from tests.helpers.faults import STARTING, takes_less_than
from tests.helpers.ranks import worker_processes

PROMPT = [5, 6, 7]


def uses(llm: LLM, stream: Iterator[StreamOutput]) -> list[Callable[[], object]]:
    return [
        lambda: llm.generate([PROMPT]),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream([PROMPT]),
        lambda: next(stream),
        lambda: llm.add_request(PROMPT, GREEDY),
        lambda: llm.abort(0),
        lambda: llm.update_weights([]),
        llm.step,
        llm.is_finished,
        llm.reset_prefix_cache,
    ]


def is_refused(use: Callable[[], object]) -> bool:
    try:
        use()
    except RuntimeError as error:
        return "forked child; make an LLM in the child instead" in str(error)
    return False


def use_all(llm: LLM, stream: Iterator[StreamOutput]) -> None:
    """Runs in a child, which ends with 7 if all went as it should."""
    if all(map(is_refused, uses(llm, stream))):
        llm.exit()
        os._exit(7)


def exit_code(child: Callable[[], object]) -> int:
    """Returns the exit code of a forked child that calls `child` and ends as a script does."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # pytest's own reports are no part of the child.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        child()
    except SystemExit as end:
        from multiprocessing.util import _exit_function

        _exit_function()  # what the interpreter does at the end of a script
        os._exit(int(end.code or 0))
    finally:
        os._exit(1)


@pytest.mark.parametrize("size", [1, 2])
def test_a_forked_child_is_refused_and_takes_nothing_with_it(size: int, tiny_qwen3: Path) -> None:
    with make_llm(tiny_qwen3, tensor_parallel_size=size) as llm, takes_less_than(STARTING):
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]
        stream = llm.stream(PROMPT, GREEDY)
        deltas = [next(stream)]

        def leave() -> None:
            with llm:
                sys.exit(3)

        def drop() -> None:
            held: dict[str, Any] = {"llm": llm.__dict__.copy(), "stream": stream}
            llm.__dict__.clear()
            held.clear()
            gc.collect()
            sys.exit(4)

        assert exit_code(lambda: use_all(llm, stream)) == 7
        assert exit_code(leave) == 3
        assert exit_code(drop) == 4
        process = get_context("fork").Process(target=use_all, args=(llm, stream))
        process.start()
        process.join(STARTING)
        assert process.exitcode == 7
        assert len(worker_processes()) == size - 1
        assert joined([*deltas, *stream])[0, 0][1] == expected
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"] == expected
