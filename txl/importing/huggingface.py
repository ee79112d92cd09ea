"""Checkpoints of transformers' TransfoXL: a folder with config.json and weights, as saved by
transformers up to 4.x."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from txl.errors import TxlError
from txl.importing import pickles
from txl.importing.names import Foreign, ties
from txl.model.config import ModelConfig

MODEL_TYPE = "transfo-xl"
_SAME_NAMES = (
    "vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "dropout", "mem_len", "div_val", "untie_r"
)  # fmt: skip
OTHER_NAMES = {  # transformers' attribute_map
    "n_token": "vocab_size", "hidden_size": "d_model", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"
}  # fmt: skip
_FLAGS = ("pre_lnorm", "same_length", "untie_r", "proj_share_all_but_first", "tie_word_embeddings")
_RENAMED = {
    "attn_dropout": "dropatt",
    "pre_norm": "pre_lnorm",
    "norm_eps": "layer_norm_epsilon",
    "tie_weight": "tie_word_embeddings",
}
_NOT_THEIRS = {
    "encoding": "relative", "final_norm": False, "variational_dropout": False, "word_dropout": 0.0, "second_target": False,
    "embedding_dropout": None, "output_dropout": None,
}  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SEGMENT = "tgt_len"  # a field of old files and of txl's export: tokens of a training segment
_SEGMENT = 128  # where there is none


def read(source: Path) -> Foreign:
    """Read a folder's configuration and tensors.

    Raises:
        TxlError: a file is missing, damaged or of another model, or config.json has options that
            the paper's model does not have.
    """
    try:
        given = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TxlError(f"config.json: cannot be read: {error}") from error
    if not isinstance(given, dict) or given.get("model_type") != MODEL_TYPE:
        kind = given.get("model_type") if isinstance(given, dict) else type(given).__name__
        raise TxlError(f"config.json: model_type must be {MODEL_TYPE!r}, got {kind!r}")
    return Foreign(from_theirs(given), tensors(source), given.get(SEGMENT, _SEGMENT), None)


def tensors(source: Path, names: Sequence[str] = WEIGHTS) -> dict[str, Tensor]:
    """Read the tensors, from one file or from those in an index, with the original code's names.

    names: file names to look for; the first that exists is read.

    Raises:
        TxlError: there is no such file, or one is damaged or holds other objects than tensors.
    """
    for name in names:
        if (source / name).is_file():
            return unprefixed(pickles.tensors(source / name))
        index = source / f"{name}.index.json"
        if index.is_file():
            return unprefixed({key: x for part in _parts(index) for key, x in pickles.tensors(part).items()})
    raise TxlError(f"holds no weights ({' or '.join(names)})")


def _parts(index: Path) -> list[Path]:
    """Return the files named by an index; they must be in its folder."""
    try:
        found = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TxlError(f"{index.name}: cannot be read: {type(error).__name__}: {error}") from error
    for name in found:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise TxlError(f"{index.name}: {name!r} is no name of a file beside it")
    return [index.parent / name for name in found]


def unprefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from transformers' names to the original code's."""
    found = {str(name).removeprefix("transformer."): x for name, x in tensors.items()}
    if len(found) < len(tensors):
        raise TxlError("tensors are there with and without the prefix 'transformer.'")
    return found


def prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from the original code's names to transformers'."""
    return {name if name.startswith("crit.") else f"transformer.{name}": x for name, x in tensors.items()}


def from_theirs(given: dict[str, Any]) -> ModelConfig:
    """Make a `ModelConfig` from the fields of config.json. Memory begins with zeros, as in
    transformers, unless `initial_memory`, a field added by txl, says otherwise; same_length becomes
    a window of mem_len keys.

    Raises:
        TxlError: a field is missing, or is not supported.
    """
    given = {own: given[other] for other, own in OTHER_NAMES.items() if other in given} | given
    if given.get("attn_type", 0) != 0:
        raise TxlError(f"attn_type {given['attn_type']!r} is none that Hugging Face's code ever computed")
    try:
        return _from_theirs(given)
    except KeyError as error:
        raise TxlError(f"the configuration lacks {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise TxlError(f"the configuration: {type(error).__name__}: {error}") from error


def _from_theirs(given: dict[str, Any]) -> ModelConfig:
    for name in _FLAGS:
        if name in given and not isinstance(given[name], bool):
            raise TxlError(f"{name} must be true or false, got {given[name]!r}")
    cutoffs = tuple(given.get("cutoffs") or ())
    tied = given.get("tie_projs")
    if tied is None:
        tied = [False] + [bool(given.get("proj_share_all_but_first", True))] * len(cutoffs)
    tie_projs = ties([bool(x) for x in tied])
    tie_weight = bool(given.get("tie_word_embeddings", True))
    clamp_len = given.get("clamp_len", -1)
    return ModelConfig(
        **{name: given[name] for name in _SAME_NAMES},
        attn_dropout=given.get("dropatt", 0.0),
        window=given["mem_len"] if given.get("same_length") else None,
        clamp_len=clamp_len if clamp_len > 0 else None,
        pre_norm=bool(given.get("pre_lnorm", False)),
        norm_eps=given.get("layer_norm_epsilon", 1e-5),
        initial_memory=given.get("initial_memory", "zeros"),
        cutoffs=cutoffs,
        d_embed=given.get("d_embed", given["d_model"]),
        tie_weight=tie_weight,
        tie_projs=tie_projs if tie_weight else "none",
    )


def to_theirs(config: ModelConfig) -> dict[str, Any]:
    """Make the fields of config.json from a `ModelConfig`.

    Raises:
        TxlError: transformers' class does not support the model; the message names the field.
    """
    for name, value in _NOT_THEIRS.items():
        if getattr(config, name) != value:
            raise TxlError(f"the checkpoint: Hugging Face's class has no {name}={getattr(config, name)!r}")
    if config.window not in (None, config.mem_len):
        raise TxlError(
            f"the checkpoint: Hugging Face's class sees all keys or mem_len={config.mem_len}, not window={config.window}"
        )
    if config.div_val > 1 and not config.proj_same_dim:
        raise TxlError("the checkpoint: Hugging Face's class projects every bin; proj_same_dim must be True")
    count = len(config.embed_widths)
    return {
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in _SAME_NAMES},
        **{theirs: getattr(config, ours) for ours, theirs in _RENAMED.items()},
        "d_embed": config.embed_width,
        "cutoffs": list(config.cutoffs),
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
        "same_length": config.window is not None,
        "tie_projs": [config.ties_projection(i) for i in range(count)],
        "proj_share_all_but_first": config.tie_projs != "none",
        "initial_memory": config.initial_memory,
    }
