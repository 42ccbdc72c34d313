"""The command line of a job: an option for each keyword of `LLM` and of `SamplingParams`."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from nanovllm.config import Config
from nanovllm.sampling_params import MAX_SEED, SamplingParams

EPILOG = """\
A row has a prompt (a text or token ids) or messages (a conversation), and may have sampling_params,
a dict that overrides the options. The output has the rows in their order, with text, token_ids and
finish_reason added, or error. Files of OpenAI's batch format (custom_id, method, url, body) are
recognised and answered in that format.

A job that was stopped, however it was, goes on where it was if it is started again.

Exit codes: 0 all rows are written (some may have an error), 1 the job stopped before, 2 it could
not be started, 130 it was interrupted.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a job is.

    engine, sampling: the keywords of `LLM` and of `SamplingParams` that were given.
    seed: keys the sampling of rows that have no seed of their own, together with their number.
    data_parallel_size: engines that share the rows; 0 makes one for each GPU, or each
        `tensor_parallel_size` of them.
    prompt_column, messages_column: where rows keep their prompt or conversation. None for both
        means "prompt" and "messages"; if one is given, the other is not looked at.
    result_prefix: begins the names of the columns that are added.
    max_errors: rows that may fail before the job stops; None for any number.
    ray: whether Ray serves the rows, with `ray_concurrency` engines that get `ray_batch_size` rows
        at a time.
    """

    input: Path
    output: Path
    engine: dict[str, Any]
    sampling: dict[str, Any]
    seed: int = 0
    data_parallel_size: int = 1
    prompt_column: str | None = None
    messages_column: str | None = None
    result_prefix: str = ""
    max_errors: int | None = None
    ray: bool = False
    ray_concurrency: int = 1
    ray_batch_size: int = 2048
    overwrite: bool = False
    progress: bool = True

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the results, as values of JSON: a job resumes only with the same."""
        names = ("input", "sampling", "seed", "prompt_column", "messages_column", "result_prefix")
        values = {name: getattr(self, name) for name in names}
        values |= {name: self.engine.get(name) for name in ("model", "dtype", "max_model_len")}
        identity: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return identity


def parse(argv: Sequence[str] | None) -> Options:
    """Parses a command line; exits with code 2 and a message if it is wrong."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    engine, sampling = (
        {name: given.pop(name) for name in _option_types(cls) if name in given}
        for cls in (Config, SamplingParams)
    )
    try:
        SamplingParams(**sampling)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return Options(engine=engine, sampling=sampling, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.batch",
        description="Completes the prompts of a JSON Lines or Parquet file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help=".jsonl or .parquet")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help=".jsonl or .parquet")
    job = parser.add_argument_group("job")
    job.add_argument("--prompt-column", metavar="NAME", help="default: prompt")
    job.add_argument("--messages-column", metavar="NAME", help="default: messages")
    job.add_argument("--result-prefix", metavar="TEXT", help="begins the names of added columns")
    job.add_argument("--seed", type=_at_least(0, MAX_SEED), help="default: 0")
    job.add_argument("--max-errors", type=_at_least(0), help="stop when more rows have failed")
    job.add_argument(
        "--data-parallel-size", type=_data_parallel_size, help="engines, or auto: one for each GPU"
    )
    job.add_argument("--ray", action="store_true", help="serve the rows with Ray Data")
    job.add_argument("--ray-concurrency", type=_at_least(1), help="engines of Ray; default: 1")
    job.add_argument("--ray-batch-size", type=_at_least(1), help="rows at a time; default: 2048")
    job.add_argument("--overwrite", action="store_true", help="start afresh if OUTPUT exists")
    job.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show a bar; default: yes"
    )
    for title, cls in (("LLM", Config), ("SamplingParams", SamplingParams)):
        group = parser.add_argument_group(f"keywords of {title}, which the README explains")
        for name, hint in _option_types(cls).items():
            flag, is_required = "--" + name.replace("_", "-"), name == "model"
            text = "a checkpoint" if is_required else f"default: {_default_of(cls, name)}"
            group.add_argument(flag, dest=name, required=is_required, help=text, **_reading(hint))
    return parser


def _option_types(cls: type) -> dict[str, Any]:
    """Returns the fields of a dataclass that a caller may set, with their types.

    Of both classes' `seed` neither is among them: the job's takes their place.
    """
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init and f.name != "seed"}


def _default_of(cls: type, name: str) -> str:
    default = cls.__dataclass_fields__[name].default  # type: ignore[attr-defined]
    if default is None or default == ():
        return "none"
    return str(default)


def _reading(hint: Any) -> dict[str, Any]:
    """Returns how `add_argument` reads a value of this type."""
    is_union = isinstance(hint, UnionType) or NoneType in get_args(hint)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if bool in kinds:
        return {"type": lambda text: {"true": True, "false": False}.get(text.lower(), text)}
    if kinds[0] in (int, float):
        return {"type": kinds[0]}
    if get_origin(kinds[0]) is Mapping:
        return {"type": json.loads, "metavar": "JSON"}
    if get_origin(kinds[0]) is Sequence:
        (item,) = get_args(kinds[0])
        return {"action": "append"} if item is str else {"type": item, "nargs": "+"}
    return {"type": str}


def _at_least(low: int, high: float = float("inf")) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}], got {value}")
        return value

    return number


def _data_parallel_size(text: str) -> int:
    return 0 if text == "auto" else int(_at_least(1)(text))
