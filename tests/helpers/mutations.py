"""Damages the files of a checkpoint at random: fields of JSON, headers of tensors, and bytes."""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 511, 512, 10**6, 10**12, -(10**9), 10**30, 10**400, 0.0,
    -0.5, 0.5, 1e-320, 1e300, 4.0, float("nan"), float("inf"), "", "x", "64", "float64", "float16",
    "torch.int8", "</s>", "../x", "ä\ud83d\n\0", "y" * 3000, [], [0], [None], [[]], ["x", 1], {},
    {"a": 1}, {"x": {"y": None}}, {"rope_type": "yarn"}, {"type": []},
)  # fmt: skip
NEW: dict[str, Any] = {  # fields that checkpoints of other kinds have
    "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]},
    "num_labels": 10**9, "id2label": 5, "quantization_config": {"quant_method": "awq"},
    "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0, "dtype": "float64",
    "layer_types": ["sliding_attention"], "rope_scaling": {"type": "linear", "factor": 0},
    "partial_rotary_factor": 0.5, "final_logit_softcapping": 30.0, "text_config": {}, "": 1,
    "to_dict": 1, "__class__": 1, "_commit_hash": 1, "tokenizer_class": "Own", "bos_token": 5,
    "chat_template": {"a": 1}, "pad_token_id": -1, "eos_token_id": 10**9, "extra_special_tokens": 1,
    "__metadata__": 5, "weight_map": None, "num_experts": 10**9, "attention_bias": 1,
    "mlp_only_layers": "x", "add_bos_token": "x", "processor_class": "Own", "torchscript": 1,
}  # fmt: skip
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mutation:
    """What was done to a file: `fields` are the keys that lead to the place."""

    fields: Place
    what: str


def mutate(file: Path, rng: random.Random) -> Mutation:
    """Damages a file in place."""
    original = file.read_bytes()
    kind = rng.random()
    if kind < 0.03:
        return _replace(file, rng)
    if kind < 0.15:
        return _mutate_bytes(file, original, rng)
    is_json = file.suffix == ".json"
    length = 0 if is_json else struct.unpack("<Q", original[:8])[0]
    content = json.loads(original if is_json else original[8 : 8 + length])
    mutation = _mutate_json(content, rng)
    for _ in range(rng.choice((0, 0, 0, 1))):  # some at two places
        second = _mutate_json(content, rng)
        mutation = Mutation(mutation.fields + second.fields, f"{mutation.what}; {second.what}")
    mutated = json.dumps(content).encode()
    if not is_json:
        mutated = struct.pack("<Q", len(mutated)) + mutated + original[8 + length :]
    file.write_bytes(mutated)
    return mutation


def _replace(file: Path, rng: random.Random) -> Mutation:
    """Leaves something else than a file, as interrupted downloads and copies do."""
    what = rng.choice(["nothing", "a directory", "a broken link", "a part", "another's file"])
    if what == "another's file":
        others = [other for other in file.parent.iterdir() if other != file]
        shutil.copy(rng.choice(others), file)
        return Mutation((), what)
    if what == "a part":
        file.with_name(f"{file.name}.incomplete").write_bytes(file.read_bytes()[:100])
    file.unlink()
    if what == "a directory":
        file.mkdir()
    elif what == "a broken link":
        file.symlink_to(file.parent / "no such file")
    return Mutation((), what)


def _mutate_bytes(file: Path, original: bytes, rng: random.Random) -> Mutation:
    at = rng.randrange(min(len(original), 400))
    change: dict[str, Callable[[], bytes]] = {
        "cut": lambda: original[:at],
        "longer": lambda: original + b"\0}",
        "flipped": lambda: (
            original[:at] + bytes([original[at] ^ 1 << rng.randrange(8)]) + original[at + 1 :]
        ),
        "no UTF-8": lambda: original[:at] + b"\xff\xfe" + original[at:],
        "empty": lambda: b"",
        "nested": lambda: b"[" * 10**5,
        "a list": lambda: b"[1]",
        "byte order mark": lambda: b"\xef\xbb\xbf" + original,
        "pointer": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    }
    what = rng.choice(list(change))
    file.write_bytes(change[what]())
    return Mutation((), f"{what} at {at}")


def _places(content: Any, prefix: Place = (), most: int = 40) -> list[Place]:
    """Returns where values are in a document, of long lists and objects only the ends."""
    keys: list[Any] = []
    if isinstance(content, dict):
        keys = list(content)
    elif isinstance(content, list):
        keys = list(range(len(content)))
    if len(keys) > most:
        keys = keys[: most // 2] + keys[-most // 2 :]
    found = [prefix] if prefix else []
    for key in keys:
        found += _places(content[key], (*prefix, key), most=6)
    return found


def _mutate_json(content: Any, rng: random.Random) -> Mutation:
    places = _places(content)
    if not places or rng.random() < 0.1:
        name = rng.choice(list(NEW))
        content[name] = copy.deepcopy(NEW[name])
        return Mutation((name,), f"{name} added")
    depth = rng.choice(sorted({len(place) for place in places}))  # few places are not deep
    place = rng.choice([place for place in places if len(place) <= depth])
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    key, value = place[-1], parent[place[-1]]
    ways = ["odd", "odd", "odd", "odd", "deleted", "swapped", "doubled"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        ways += ["scaled", "scaled"]
    way = rng.choice(ways)
    where = "/".join(map(str, place))
    if way == "deleted":
        del parent[key]
        return Mutation(place, f"{where} deleted")
    if way == "odd":
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif way == "scaled":
        parent[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9))
    elif way == "doubled":
        parent[key] = [value, value] if not isinstance(value, list | str) else value * 2
    else:
        other: Any = content
        for step in rng.choice(places):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    return Mutation(place, f"{where} {way}: {str(parent[key])[:60]!r}")
