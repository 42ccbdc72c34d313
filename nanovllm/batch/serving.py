"""Serves rows: reads as many as the engine has room for, and makes output rows of its answers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nanovllm.batch.engines import Answer, Engine
from nanovllm.batch.files import BadRow, Row
from nanovllm.batch.requests import Format


@dataclass(frozen=True, slots=True)
class ServedRow:
    """An output row, what it took, and the number of its input row."""

    index: int
    row: Row
    is_error: bool = False
    num_prompt_tokens: int = 0
    num_tokens: int = 0


def serve(
    rows: Iterable[tuple[int, Row | BadRow]],
    form: Format,
    engine: Engine,
    may_read: Callable[[], bool] = lambda: True,
) -> Iterator[ServedRow]:
    """Serves numbered rows and yields them as they end; a row that cannot be served is an error.

    may_read: whether more rows may be read now.
    """
    left = iter(rows)
    is_read = False
    reading: dict[int, Row] = {}
    while reading or not is_read:
        room = engine.room() if may_read() or not reading else 0
        while room > 0 and not is_read:
            index, row = next(left, (-1, BadRow("")))
            is_read = index < 0
            if is_read:
                break
            room -= 1
            if isinstance(row, BadRow):
                yield _failed(form, index, row, row.reason)
                continue
            try:
                request = form.request(index, row)
            except (TypeError, ValueError) as error:
                yield _failed(form, index, row, str(error))
                continue
            reading[index] = row
            engine.submit(index, request)
        for answer in engine.poll() if reading else []:
            yield _answered(form, reading.pop(answer[0]), answer)


def _failed(form: Format, index: int, row: Row | BadRow, reason: str) -> ServedRow:
    return ServedRow(index, form.error(index, row, reason), is_error=True)


def _answered(form: Format, row: Row, answer: Answer) -> ServedRow:
    index, output = answer
    if isinstance(output, str):
        return _failed(form, index, row, output)
    samples = output.get("outputs") or [output]
    return ServedRow(
        index,
        form.result(index, row, output),
        num_prompt_tokens=len(output["prompt_token_ids"]),
        num_tokens=sum(len(sample["token_ids"]) for sample in samples),
    )
