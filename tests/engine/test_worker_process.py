"""Tests that a rank does what rank 0's messages, each (method, arguments), tell it to do."""

import pickle
from typing import Any

from nanovllm.engine.ipc import Receiver, Sender
from nanovllm.engine.worker_process import serve


class Recorder:
    """Stands in for a runner, and records the methods that are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.calls.append((method, arguments))


def test_every_method_is_a_message_and_exit_is_the_last() -> None:
    calls = [("launch", ({"rows": [1, 2]},)), ("update_weights", ("/new", 3)), ("exit", ())]
    sender = Sender(num_receivers=1)
    receiver, runner = Receiver(sender.channel, 0), Recorder()
    for message in [*calls, ("launch", ("too late",))]:
        sender.send(pickle.dumps(message), check=lambda: None)
    serve(runner, receiver)  # type: ignore[arg-type]
    assert runner.calls == calls
    receiver.close()
    sender.close()
