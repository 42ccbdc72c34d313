"""Tests that the sampling parameters of rows get from the host to the device unchanged."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.batch import RowInit
from nanovllm.engine.staging import HostToDevice
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState
from tests.helpers.kernel_cases import DEVICE

SEEDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
TEMPERATURES = [0, 1e-5, 0.7, np.float32(1.5), 1e30]


def test_rows_get_their_own_parameters_and_others_keep_theirs() -> None:
    state = SamplingState.zeros(8, DEVICE)
    for field in dataclasses.fields(state):
        getattr(state, field.name).fill_(7)
    params = [SamplingParams(temperature=temperature) for temperature in TEMPERATURES]
    columns = SamplingState.columns(params, SEEDS)
    index, *on_device = HostToDevice(DEVICE, TPGroup()).send(np.array([5, 0, 7, 2, 3]), *columns)
    state.start(index, *on_device)
    assert [int(seed) % 2**64 for seed in state.seeds[index]] == SEEDS
    assert state.temperatures[index].tolist() == torch.tensor(TEMPERATURES).tolist()
    for row in (1, 4, 6):
        assert state.seeds[row] == state.temperatures[row] == 7


@pytest.mark.parametrize("num", [1, 2, 3])
def test_staging_keeps_integers_and_floats_apart(num: int) -> None:
    ints, floats = np.arange(num) - 2**62, np.linspace(-1.25, 1e300, num)
    sent = HostToDevice(DEVICE, TPGroup()).send(ints, floats, ints.astype(np.int32) * 0 + 5)
    assert [tensor.dtype for tensor in sent] == [torch.int64, torch.float64, torch.int64]
    assert sent[0].tolist() == ints.tolist()
    assert sent[1].tolist() == floats.tolist()
    assert sent[2].tolist() == [5] * num


def test_rows_of_one_call_share_their_parameters_in_a_message() -> None:
    """The parameters are pickled once for all rows of a step."""
    params = SamplingParams(temperature=0.5)
    rows = pickle.loads(pickle.dumps([RowInit(params, seed, [1]) for seed in SEEDS]))
    assert rows[0].sampling_params == params
    assert all(row.sampling_params is rows[0].sampling_params for row in rows)
