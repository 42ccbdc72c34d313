"""What runs in the process of a rank from 1 on: a runner that is told what to do by rank 0.

It ends when it is told to, when a call fails, or with the parent or the pipe to it.
"""

import os
import pickle
import shutil
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import torch

from nanovllm.config import Config
from nanovllm.engine.ipc import Channel, Receiver
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import PeerLostError


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """What a worker process is to be.

    config: the engine's, for this rank. num_threads: of the CPU.
    store_file: through which the ranks find each other. channel: from rank 0.
    """

    config: Config
    rank: int
    num_threads: int
    store_file: str
    channel: Channel


def connect(config: Config, rank: int, store_file: str) -> TPGroup:
    """Meets the other ranks. Hidden states of one step are what they will often exchange."""
    token_bytes = config.hf_config.hidden_size * config.torch_dtype.itemsize
    exchange_shape = config.max_num_seqs, token_bytes
    size = config.tensor_parallel_size
    return TPGroup.connect(rank, size, store_file, config.torch_device, exchange_shape)


def start(pipe_fd: int, parent_id: int) -> None:
    """Runs a worker process: it reports that it is there, builds its runner, and serves it.

    pipe_fd: the file descriptor of the pipe to the parent, which sends the `WorkerArguments`.
    """
    pipe = Connection(pipe_fd)
    try:
        arguments: WorkerArguments = pipe.recv()
    except EOFError:  # the parent has gone
        os._exit(1)
    config, rank, store_file = arguments.config, arguments.rank, arguments.store_file
    watched = pipe, parent_id, Path(store_file).parent
    watcher = Thread(target=_exit_with_parent, args=watched, daemon=True)
    watcher.start()
    try:
        torch.set_num_threads(arguments.num_threads)
        if config.torch_device.type == "cuda":
            torch.cuda.set_device(config.torch_device)
        receiver = Receiver(arguments.channel, rank - 1)
        pipe.send(("", False))
        serve(ModelRunner(config, connect(config, rank, store_file)), receiver)
    except BaseException as error:
        try:
            pipe.send((traceback.format_exc(), isinstance(error, PeerLostError)))
        except OSError:  # the parent has gone
            watcher.join()
        os._exit(1)
    os._exit(0)  # rather than take apart, for a second, what ends with the process


def serve(runner: ModelRunner, receiver: Receiver) -> None:
    """Calls the methods of `runner` that rank 0 names, up to and including `exit`."""
    method = ""
    while method != "exit":
        method, arguments = pickle.loads(receiver.receive())
        getattr(runner, method)(*arguments)


def _exit_with_parent(pipe: Connection, parent_id: int, directory: Path) -> None:
    """Ends this process when its parent ends, whatever the main thread waits for."""
    with suppress(OSError):  # nothing more is sent; children of the parent's may hold the pipe too
        while not pipe.poll(1) and os.getppid() == parent_id:
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
