"""Log probabilities on their way from the device to the results."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from nanovllm.engine.batch import StepLogprobs
from nanovllm.outputs import Logprobs
from nanovllm.utils.special_rows import TopLogprobs


@dataclass(frozen=True, slots=True)
class Report:
    """What a part of a step reports.

    top: one row for each token.
    owners: whose rows these are: sequence id, number of rows, and how many of the most likely ids
        it wants of those that there are.
    """

    top: TopLogprobs
    owners: list[tuple[int, int, int]]

    def on_host(self) -> "Report":
        """Returns a copy on the host; on a GPU it is complete once the current stream has come
        here."""
        ids, logprobs = (_on_host(x) for x in (self.top.ids, self.top.logprobs))
        return Report(TopLogprobs(ids, logprobs), self.owners)

    def by_sequence(self) -> Iterator[tuple[int, list[Logprobs]]]:
        """Yields each sequence's id and what a copy on the host says of its rows."""
        rows = zip(self.top.ids.tolist(), self.top.logprobs.tolist(), strict=True)
        for seq_id, num_rows, num_top in self.owners:
            wanted = slice(1 + num_top)
            # An id that comes twice, as it is sampled and likely, keeps the first place.
            yield (
                seq_id,
                [
                    dict(zip(ids[wanted], logprobs[wanted], strict=True))
                    for _, (ids, logprobs) in zip(range(num_rows), rows, strict=False)
                ],
            )


class StepReports:
    """The reports of a step, copied to the host as its parts are launched."""

    def __init__(self) -> None:
        self._sampled: list[Report] = []
        self._prompts: list[Report] = []

    def add_sampled(self, report: Report | None) -> None:
        if report is not None:
            self._sampled.append(report.on_host())

    def add_prompts(self, reports: Iterable[Report]) -> None:
        self._prompts += [report.on_host() for report in reports]

    def merged(self) -> StepLogprobs:
        """Returns what all say, once the step has ended."""
        prompts: dict[int, list[Logprobs]] = {}
        for report in self._prompts:
            for seq_id, logprobs in report.by_sequence():
                prompts.setdefault(seq_id, []).extend(logprobs)
        pairs = (pair for report in self._sampled for pair in report.by_sequence())
        return StepLogprobs({seq_id: logprobs for seq_id, (logprobs,) in pairs}, prompts)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return copy.copy_(x, non_blocking=True)
