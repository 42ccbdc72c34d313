"""Tests the Triton kernels of filters, logit edits and log probabilities against torch's.

Ids must be equal, with ties, masked ids and thresholds that fall on equal logits, too. The
interpreter takes half a second for a row, so a GPU runs many more cases.
"""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.kernels import filters as triton_filters
from nanovllm.kernels import logit_edits, logprobs
from nanovllm.layers import filters as torch_filters
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import EditRows, FilterRows, LogitEdits
from tests.helpers.kernel_cases import DEVICE, DTYPES, HAS_GPU
from tests.helpers.sampling import broken_logits, moved, sampling_state

CPU = torch.device("cpu")
INF = float("inf")
WANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_k": 3, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 10**12, "top_p": 1.0},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 1 - 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 6, "top_p": 0.8},
    {"min_p": 0.3, "top_k": 100, "top_p": 0.9, "temperature": 1.7},
    {"top_k": 7, "top_p": 0.7, "temperature": 1e-5},
    {"top_k": 7, "top_p": 0.7, "temperature": 1e30},
]


def distribution(kind: str, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns logits [vocab] on the CPU."""
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(vocab, generator=generator)
    if kind == "flat":
        return torch.zeros(vocab, dtype=dtype)
    if kind == "tied":
        tied = (noise * 2).round() / 2  # has zeros of both signs
        return torch.where(torch.arange(vocab) % 2 == 0, tied, 0 - tied).to(dtype)
    if kind == "masked":
        return torch.where(torch.arange(vocab) % 3 == 1, noise * 3, -INF).to(dtype)
    return (noise * {"random": 1, "peaked": 6}[kind]).to(dtype)


KINDS = ["random", "peaked", "flat", "tied", "masked"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_where_logits_are_no_numbers(dtype: torch.dtype) -> None:
    logits, is_broken = broken_logits(700, dtype)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5, min_p=0.1),
    ):
        wants = [params] * len(logits)
        state = state_of(wants)
        expected = torch_filters.draw_filtered(logits, filters_of(wants, CPU), state)
        assert ((expected == -1) == is_broken).all()
        assert ((state.last_tokens >= 0) & (state.last_tokens < 700)).all()
        on_device = moved(state_of(wants), DEVICE)
        filters = filters_of(wants, DEVICE)
        drawn = triton_filters.draw_filtered(logits.to(DEVICE), filters, on_device)
        assert torch.equal(drawn.cpu(), expected)
        assert torch.equal(on_device.last_tokens.cpu(), state.last_tokens)


def filters_of(wants: list[SamplingParams], device: torch.device) -> FilterRows:
    n = len(wants)
    columns = FilterRows.columns(range(n), range(n), wants)
    return FilterRows(*(torch.from_numpy(column).to(device) for column in columns))


def state_of(wants: list[SamplingParams], step: int = 0) -> SamplingState:
    n = len(wants)
    return sampling_state(
        temperatures=torch.tensor([params.temperature for params in wants], dtype=torch.float32),
        seeds=torch.arange(n) * 0x123456789ABCDEF,
        context_lens=torch.arange(n) * 37 + step,
    )


def check_draws(logits: torch.Tensor, wants: list[SamplingParams], num_draws: int = 1) -> None:
    """Asserts that both draw the same ids from logits [len(wants), vocab] on the CPU."""
    for step in range(num_draws):
        state = state_of(wants, step)
        on_device = moved(state, DEVICE)
        expected = torch_filters.draw_filtered(logits, filters_of(wants, CPU), state)
        drawn = triton_filters.draw_filtered(
            logits.to(DEVICE), filters_of(wants, DEVICE), on_device
        )
        assert drawn.tolist() == expected.tolist()
        assert torch.equal(on_device.last_tokens.cpu(), state.last_tokens)
        assert torch.equal(state.last_tokens, expected)


CASES = [(9, "tied", torch.float16), (503, "masked", torch.float32), (5000, "tied", torch.float32)]
GPU_CASES = [(v, k, d) for v in (9, 503, 5000, 20000) for k in KINDS for d in DTYPES]


@pytest.mark.parametrize(("vocab", "kind", "dtype"), GPU_CASES if HAS_GPU else CASES, ids=str)
def test_filters_draw_what_torch_draws(vocab: int, kind: str, dtype: torch.dtype) -> None:
    wants = [SamplingParams(**want) for want in WANTS]
    logits = distribution(kind, vocab, dtype).expand(len(wants), -1).contiguous()
    check_draws(logits, wants, num_draws=20 if HAS_GPU else 1)


@pytest.mark.parametrize("dtype", [torch.float32] * HAS_GPU + [torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS if HAS_GPU else ["random"])
def test_filters_on_a_real_vocabulary(kind: str, dtype: torch.dtype) -> None:
    wants = [SamplingParams(**want) for want in (WANTS if HAS_GPU else WANTS[4:7:2])]
    logits = distribution(kind, 151936, dtype).expand(len(wants), -1).contiguous()
    check_draws(logits, wants)


@pytest.mark.parametrize("kind", ["tied", "flat"])
def test_what_is_kept_is_exactly_what_torch_keeps(kind: str) -> None:
    """Every kept id is drawn by some position if few are kept, and no other id is."""
    params = SamplingParams(top_k=6, top_p=0.9, temperature=1.5)
    n = 400 if HAS_GPU else 40
    logits = distribution(kind, 503, torch.float32)
    kept = torch_filters.kept_ids(logits, 1.5, 6, 0.9, -INF)
    assert 3 <= len(kept) <= 6
    wants = filters_of([params] * n, DEVICE)
    state = moved(state_of([params] * n), DEVICE)
    drawn = triton_filters.draw_filtered(logits.expand(n, -1).contiguous().to(DEVICE), wants, state)
    assert set(drawn.tolist()) == set(kept.tolist())


@pytest.mark.parametrize("value", [float("nan"), -INF])
def test_no_id_where_no_logit_is_a_number(value: float) -> None:
    """The next step, which may be in flight, would look up an invalid last token out of bounds."""
    wants = [SamplingParams(**want) for want in WANTS]
    logits = torch.full((len(wants), 700), value, device=DEVICE)
    state = moved(state_of(wants), DEVICE)
    drawn = triton_filters.draw_filtered(logits, filters_of(wants, DEVICE), state)
    assert (drawn == -1).all()
    assert state.last_tokens.min() >= 0
    assert state.last_tokens.max() < 700


def edit_rows(
    wants: list[SamplingParams], num_prompts: list[int], late_ids: frozenset[int], vocab: int
) -> EditRows:
    """Returns the edits of rows in reversed order: the first is for the last row."""
    edits = []
    for params in wants:
        pair = LogitEdits.columns(params, late_ids if params.min_tokens else frozenset(), vocab)
        ids, biases = (torch.from_numpy(column).to(DEVICE) for column in pair)
        edits.append(LogitEdits(params.allowed_token_ids is not None, ids, biases))
    index = list(reversed(range(len(wants))))
    columns = EditRows.columns(index, index, wants, edits, num_prompts)
    tensors = [torch.from_numpy(column).to(DEVICE) for column in columns]
    return EditRows(edits, any(params.has_penalties for params in wants), *tensors)


def directly(
    logits: torch.Tensor, params: SamplingParams, tokens: list[int], num_prompt: int, late: set[int]
) -> torch.Tensor:
    """Computes the edited logits of one row, one id after the other."""
    completion = tokens[num_prompt:]
    out = []
    for token_id, z in enumerate(logits.double().tolist()):
        z += (params.logit_bias or {}).get(token_id, 0)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            z = -INF
        if len(completion) < params.min_tokens and token_id in late:
            z = -INF
        if token_id in tokens:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        count = completion.count(token_id)
        z -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        out.append(z)
    return torch.tensor(out, dtype=torch.float64)


EDITS: list[dict[str, Any]] = [
    {"logit_bias": {3: 2.5, 600: -100, 699: 0.1}},
    {"allowed_token_ids": [5, 699, 7, 5]},
    {"allowed_token_ids": [5, 699, 7], "logit_bias": {7: 1.5, 8: 100}, "repetition_penalty": 2.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "presence_penalty": 0.7, "frequency_penalty": -0.2},
    {"frequency_penalty": 0.25, "logit_bias": {11: 4.0}},
    {"presence_penalty": -2, "temperature": 0},
    {"min_tokens": 3, "stop_token_ids": [4]},
    {"min_tokens": 30, "stop_token_ids": [4], "logit_bias": {4: 100, 5: 1}},
    {"min_tokens": 30, "stop_token_ids": [4], "allowed_token_ids": [4, 5, 6]},
    {"min_tokens": 5, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", [torch_filters, logit_edits], ids=["torch", "triton"])
def test_edits_equal_a_direct_computation(implementation: Any, dtype: torch.dtype) -> None:
    vocab, width, late = 700, 4096, frozenset({4, 9, 100000})
    rng = np.random.default_rng(0)
    wants = [SamplingParams(**want) for want in EDITS]
    n = len(wants)
    lens = [1, 5, 2000, 9, 1500, 1025, 1024, 5, 12, 30, 40]
    num_prompts = [max(length - num, 1) for length, num in zip(lens, [3, 40] * n, strict=False)]
    most = [40 if i % 2 else vocab for i in range(n)]
    tokens = [rng.integers(0, m, length).tolist() for m, length in zip(most, lens, strict=True)]
    logits = torch.from_numpy(rng.normal(size=(n, vocab)) * 4).to(dtype)
    expected = torch.stack(
        [
            directly(logits[n - 1 - i], params, tokens[i], num_prompts[i], set(late))
            for i, params in enumerate(wants)
        ]
    )
    history = torch.full((n, width), 17, dtype=torch.int32)
    for i, ids in enumerate(tokens):
        history[n - 1 - i, : len(ids)] = torch.tensor(ids)
    state = moved(sampling_state(context_lens=torch.tensor(lens[::-1])), DEVICE)
    edit = edit_rows(wants, num_prompts, late, vocab)
    edited = implementation.edit_logits(logits.to(DEVICE), edit, history.to(DEVICE), state).cpu()
    assert torch.equal(edited.isinf(), expected.isinf())
    finite = ~expected.isinf()
    # A few roundings to fp32 of values up to 100, and of up to 1500 * 0.2.
    torch.testing.assert_close(edited[finite].double(), expected[finite], rtol=1e-6, atol=1e-5)
    again = implementation.edit_logits(logits.to(DEVICE), edit, history.to(DEVICE), state).cpu()
    assert torch.equal(edited, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num_top"), [(9, 9), (503, 0), (503, 20), (9001, 5)])
def test_logprobs_equal_torch(vocab: int, num_top: int, kind: str, dtype: torch.dtype) -> None:
    rows = [distribution(kind, vocab, dtype), distribution("random", vocab, dtype)]
    padded = torch.stack([*rows, *rows]).repeat(1, 2)
    index, token_ids = torch.tensor([2, 1, 3]), torch.tensor([1, vocab - 1, 4])
    expected = torch_filters.top_logprobs(padded[:, :vocab], index, token_ids, num_top)
    on_device = padded.to(DEVICE)[:, :vocab]  # rows need not follow each other at once
    top = logprobs.top_logprobs(on_device, index.to(DEVICE), token_ids.to(DEVICE), num_top)
    assert top.ids.tolist() == expected.ids.tolist()
    assert top.ids.shape == (3, 1 + num_top)
    torch.testing.assert_close(top.logprobs.cpu(), expected.logprobs, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
def test_logprobs_of_a_real_vocabulary() -> None:
    logits = torch.stack([distribution(kind, 151936, torch.bfloat16) for kind in KINDS])
    index, token_ids = torch.arange(len(KINDS)), torch.arange(len(KINDS)) * 30001
    expected = torch_filters.top_logprobs(logits, index, token_ids, 20)
    top = logprobs.top_logprobs(logits.cuda(), index.cuda(), token_ids.cuda(), 20)
    assert top.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(top.logprobs.cpu(), expected.logprobs, rtol=1e-5, atol=1e-5)
