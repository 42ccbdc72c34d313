"""Tests Ctrl-C in the middle of the scheduler's work, as in a user's loop of `step`."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import GREEDY, NUM_TOKENS, Ids, greedy_ids, make_paged_llm


@pytest.mark.parametrize("method", ["schedule", "_release", "_end", "_batch"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_interrupt_within_the_bookkeeping(tiny_qwen3: Path, method: str, number: int) -> None:
    """Ctrl-C is not deferred in a loop of `step`, but every request still ends, with the right
    ids."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    expected = greedy_ids(make_paged_llm(tiny_qwen3), prompts, NUM_TOKENS)
    llm = make_paged_llm(tiny_qwen3)
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    original, num_calls = getattr(llm.scheduler, method), 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = original(*args)
        if num_calls == number:
            raise KeyboardInterrupt
        return result

    setattr(llm.scheduler, method, interrupted)
    results: dict[int, Ids] = {}
    for _ in range(100):
        try:
            results.update(llm.step()[0])
        except KeyboardInterrupt:
            continue
        if llm.is_finished():
            break
    assert num_calls >= number, "it was not interrupted"
    assert llm.is_finished()
    assert [results[seq_id] for seq_id in ids] == expected
    llm.scheduler.block_manager.check_integrity([])
