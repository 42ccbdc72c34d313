"""Tests that the ring between processes loses, tears, reorders and overwrites nothing, whether the
sender or a receiver is slow."""

import hashlib
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nanovllm.engine.ipc import NUM_SLOTS, SLOT_BYTES, SLOT_HEADER_BYTES, Channel, Receiver, Sender
from tests.helpers.faults import SOON, STARTING

NUM, ROOM = 4, 64  # slots, and payload bytes in each slot


class StopWaitingError(Exception):
    """Is raised by the tests' check to end a wait."""


def patient() -> None:
    """Lets a wait go on, when it is passed as the check."""


def give_up() -> None:
    raise StopWaitingError


def small_sender(num_receivers: int) -> Sender:
    return Sender(num_receivers, NUM, ROOM + SLOT_HEADER_BYTES)


@pytest.fixture
def sender() -> Iterator[Sender]:
    """Provides a sender for one receiver."""
    sender = small_sender(1)
    yield sender
    sender.close()


def receive_all(channel: Channel, index: int, count: int, pause: float, pipe: Connection) -> None:
    """Runs in a receiver's process: starts when it is told to, pauses after each message, and sends
    back the messages, the large ones as digests."""
    receiver = Receiver(channel, index)
    pipe.send("there")
    pipe.recv()
    got: list[bytes] = []
    for _ in range(count):
        got.append(digest(receiver.receive()))
        time.sleep(pause)
    receiver.close()
    pipe.send(got)


def digest(message: bytes) -> bytes:
    return message if len(message) < 1000 else hashlib.sha256(message).digest()


@contextmanager
def receivers(
    sender: Sender, count: int, pauses: list[float], may_begin: bool = True
) -> Iterator[list[Connection]]:
    """Starts a process per pause that receives `count` messages and returns them through its pipe.
    Unless `may_begin`, each process starts to receive only after something is sent through its
    pipe."""
    context = get_context("fork")
    processes, pipes = [], []
    for index, pause in enumerate(pauses):
        pipe, theirs = context.Pipe()
        args = (sender.channel, index, count, pause, theirs)
        processes.append(context.Process(target=receive_all, args=args, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    try:
        for pipe in pipes:
            assert pipe.recv() == "there"
            if may_begin:
                pipe.send("begin")
        yield pipes
        for process in processes:
            process.join(SOON)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def result(pipe: Connection) -> list[bytes]:
    assert pipe.poll(STARTING), "the receiver is not done"
    got: list[bytes] = pipe.recv()
    return got


def messages_of_all_sizes() -> list[bytes]:
    """Returns messages in random order whose sizes are around those of one slot and of all slots,
    with empty ones among them."""
    sizes = [0, 1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, NUM * ROOM, NUM * ROOM + 1, 9 * NUM * ROOM]
    rng = random.Random(0)
    return [rng.randbytes(size) for size in rng.sample(sizes * 6, 6 * len(sizes))]


def test_three_receivers_of_different_speed_get_everything_in_order() -> None:
    messages = messages_of_all_sizes()
    sender = small_sender(3)
    with receivers(sender, len(messages), [0, 0.001, 0.01]) as pipes:
        for message in messages:
            sender.send(message, patient)
        for pipe in pipes:
            assert result(pipe) == [digest(message) for message in messages]
    sender.close()


def test_messages_larger_than_the_whole_segment() -> None:
    sender = Sender(1)
    larger = random.Random(1).randbytes(3 * NUM_SLOTS * SLOT_BYTES + 12345)
    messages = [b"first", larger, b"", larger[::-1], b"last"]
    with receivers(sender, len(messages), [0]) as (pipe,):
        for message in messages:
            sender.send(message, patient)
        assert result(pipe) == [digest(message) for message in messages]
    sender.close()


def test_commands_in_a_row_wait_for_a_sleeping_receiver(sender: Sender) -> None:
    """The sender waits once the ring is full, and not before, so it overwrites no unread
    message."""
    messages = [f"command {i}".encode() for i in range(3000)]
    with receivers(sender, len(messages), [0], may_begin=False) as (pipe,):
        for message in messages[:NUM]:
            sender.send(message, give_up)
        with pytest.raises(StopWaitingError):
            sender.send(messages[NUM], give_up)
        pipe.send("begin")
        for message in messages[NUM:]:
            sender.send(message, patient)
        assert result(pipe) == messages


def test_two_channels_at_once() -> None:
    senders = [small_sender(1), small_sender(2)]
    assert senders[0].channel.fd != senders[1].channel.fd
    messages = [[f"{channel}: {i}".encode() * 20 for i in range(50)] for channel in "ab"]
    with receivers(senders[0], 50, [0]) as first, receivers(senders[1], 50, [0, 0.002]) as second:
        for a, b in zip(*messages, strict=True):
            senders[0].send(a, patient)
            senders[1].send(b, patient)
        assert result(first[0]) == messages[0]
        assert [result(pipe) for pipe in second] == [messages[1]] * 2
    for sender in senders:
        sender.close()


def test_random_interleaving_in_one_process(sender: Sender) -> None:
    """The ring behaves as a list does, and stays usable after a check has raised."""
    rng = random.Random(2)
    receiver = Receiver(sender.channel, 0)
    unread: list[bytes] = []
    for step in range(2000):
        if rng.random() < 0.5:
            message = str(step).encode()
            with pytest.raises(StopWaitingError) if len(unread) == NUM else nullcontext():
                sender.send(message, give_up)
                unread.append(message)
        else:
            with nullcontext() if unread else pytest.raises(StopWaitingError):
                assert receiver.receive(give_up) == unread.pop(0)
    receiver.close()


def test_check_ends_a_wait(sender: Sender) -> None:
    receiver = Receiver(sender.channel, 0)
    calls: list[int] = []

    def third_time() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise StopWaitingError

    with pytest.raises(StopWaitingError):
        receiver.receive(third_time)
    assert len(calls) == 3
    calls.clear()
    for _ in range(NUM):
        sender.send(b"", third_time)
    assert not calls, "there was room"
    with pytest.raises(StopWaitingError):
        sender.send(b"", third_time)
    assert len(calls) == 3
    receiver.close()


def test_memory_has_no_name_and_ends_with_its_users() -> None:
    """Because the shared memory has no name, it cannot be left behind and no other process can open
    it."""
    sender = small_sender(1)
    receiver = Receiver(sender.channel, 0)
    fd = os.dup(sender.channel.fd)
    assert os.fstat(fd).st_nlink == 0
    path = os.readlink(f"/proc/self/fd/{fd}")
    assert path in Path("/proc/self/maps").read_text()
    for close in (receiver.close, sender.close) * 2:
        close()
    os.close(fd)
    assert path not in Path("/proc/self/maps").read_text()
    assert path not in map(os.readlink, links(Path("/proc/self/fd")))


def links(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_symlink()]


def test_close_after_an_interrupted_message(sender: Sender) -> None:
    receiver = Receiver(sender.channel, 0)
    with pytest.raises(StopWaitingError) as kept:  # keeps the interrupted frames alive
        sender.send(bytes(2 * NUM * ROOM), give_up)
    with pytest.raises(StopWaitingError):
        receiver.receive(give_up)
    receiver.close()
    sender.close()
    assert kept.value.__traceback__ is not None
