"""Tests the kinds of tokenizers that checkpoints have, what they decode to, and stop ids."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.engine.tokenizer import load_tokenizer, stop_token_ids
from tests.helpers.checkpoints import CORPUS, make_checkpoint
from tests.helpers.engines import make_llm

TEXTS = ["list all prime numbers", " two  spaces", "naïve 🙂 é", "a\nb", "", "<0x41>"]


def make_llama_tokenizer(path: Path) -> None:
    """Writes a tokenizer as Llama 2 has it: spaces become ▁, one is put before a text, and what the
    vocabulary lacks falls back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    # The trainer marks bytes as special tokens, which would not be merged in texts.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(path)


def keep_vocabulary_alone(path: Path) -> None:
    """Replaces a byte-level tokenizer.json by the files of slow tokenizers."""
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"})
    )


@pytest.fixture(params=["byte-level", "llama", "vocabulary files"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    is_llama = request.param == "llama"
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", with_tokenizer=not is_llama)
    if is_llama:
        make_llama_tokenizer(path)
    if request.param == "vocabulary files":
        keep_vocabulary_alone(path)
    return path


def test_texts_go_in_and_out_as_in_hugging_face(checkpoint: Path) -> None:
    reference = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer = load_tokenizer(str(checkpoint))
    assert tokenizer is not None
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert text.strip() in tokenizer.decode(ids)
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    with make_llm(checkpoint) as llm:
        outputs = llm.generate([text for text in TEXTS if text], params, use_tqdm=False)
    for output in outputs:
        assert output["text"] == reference.decode(output["token_ids"])


def test_llama_tokens_keep_spaces_and_fall_back_to_bytes(tmp_path: Path) -> None:
    make_llama_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    ids = tokenizer.encode("🙂")
    names = tokenizer.convert_ids_to_tokens(ids)
    assert [name for name in names if name != "▁"] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.decode(ids) == "🙂"
    ids = tokenizer.encode("list all")
    assert tokenizer.convert_ids_to_tokens(ids)[0].startswith("▁")
    assert tokenizer.decode(ids) == "list all"


def test_sentencepiece_model(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    for text in ("list all prime numbers", "naïve 🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_sentencepiece_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"cannot load the tokenizer.*pip install sentencepiece"):
        load_tokenizer(str(tmp_path))


def test_no_tokenizer_and_a_damaged_one(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"cannot load the tokenizer of {path}"):
        make_llm(path)
    (path / "tokenizer.json").unlink()
    assert load_tokenizer(str(path)) is None
    assert "has no tokenizer: prompts must be token ids" in caplog.text


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (None, None, set()),
        (5, '{"eos_token_id": [6, 7]}', {5, 6, 7}),
        ([5, 6], '{"eos_token_id": null}', {5, 6}),
        ([5, 6], "{}", {5, 6}),
    ],
)
def test_stop_ids(own: Any, generation: str | None, expected: set[int], tmp_path: Path) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    config: Any = SimpleNamespace(eos_token_id=own, vocab_size=8)
    assert stop_token_ids(str(tmp_path), config, None) == expected


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", r"cannot read .*generation_config\.json"),
        ("[]", r"cannot read .*generation_config\.json"),
        ('{"eos_token_id": "</s>"}', r"eos_token_id must be ints, got \['</s>'\]"),
        (
            '{"eos_token_id": 512}',
            r"must be below vocab_size=512, got \[512\] in generation_config",
        ),
        (
            '{"eos_token_id": [-1]}',
            r"must be below vocab_size=512, got \[-1\] in generation_config",
        ),
        ('{"eos_token_id": [1, 2.5]}', r"eos_token_id must be ints, got \[2\.5\]"),
    ],
)
def test_bad_stop_ids(content: str, pattern: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))
    (path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=pattern):
        make_llm(path)


@pytest.fixture
def copied(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Makes a copy of a checkpoint that the test may change."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "copied"))


def test_the_tokenizer_of_another_model(copied: Path) -> None:
    content = json.loads((copied / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[next(reversed(vocabulary))] = 151_000
    (copied / "tokenizer.json").write_text(json.dumps(content))
    fix = "the tokenizer is another model's; replace its files"
    with pytest.raises(ValueError, match=f"ids up to 151000, but vocab_size=512 .*: {fix}"):
        make_llm(copied)


def test_added_tokens_without_an_embedding(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(513 - len(tokenizer))])
    tokenizer.save_pretrained(copied)
    last = tokenizer.convert_ids_to_tokens(512)
    with make_llm(copied) as llm:
        assert f"prompts must not have the tokenizer's added tokens ['{last}']" in caplog.text
        with pytest.raises(ValueError, match="prompt 0 has token id 512 at index 0"):
            llm.generate(last)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"chat_template": 5}, "chat_template must be a text, not 5; correct it"),
        ({"model_max_length": "64"}, "model_max_length in .* must be a number, got '64'"),
    ],
)
def test_fields_of_other_types(changes: dict[str, Any], pattern: str, copied: Path) -> None:
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=pattern):
        make_llm(copied)


def test_a_text_that_the_tokenizer_cannot_encode(copied: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "[UNK]")))
    fast.save_pretrained(copied)
    with make_llm(copied) as llm:
        assert len(llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
        with pytest.raises(ValueError, match=r"the tokenizer fails on prompt 1: .*UNK"):
            llm.generate(["a", "b"])


def test_a_file_beside_the_vocabulary_is_named(copied: Path) -> None:
    (copied / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: it holds a list, not an object"):
        make_llm(copied)
