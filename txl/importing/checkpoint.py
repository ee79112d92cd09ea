"""Conversion of other code's checkpoints to txl's, and export for transformers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from txl.errors import TxlError
from txl.importing import huggingface, pytorch, tensorflow, vocabulary
from txl.importing.names import Foreign, Lengths, original, translate
from txl.model import as_transformer
from txl.model.config import MAX_SIZE
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath, new_folder, remove_leftovers, replace_text, replaced
from txl.text.vocabulary import Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints

Format = Literal["auto", "pytorch", "tensorflow", "huggingface", "nvidia"]
FORMATS: tuple[Format, ...] = get_args(Format)


class _Code(NamedTuple):
    """A code base whose checkpoints can be imported.

    Attributes:
        find: returns the argument of `read`, or None if a path is not one of its checkpoints.
        looks: description of its checkpoints, for messages.
    """

    find: Callable[[Path], Path | None]
    read: Callable[[Path, Lengths], Foreign]
    looks: str


_CODES = {
    "huggingface": _Code(
        huggingface.find, huggingface.read, "a folder with config.json, as transformers saves TransfoXL"
    ),
    "pytorch": _Code(pytorch.find, pytorch.read, f"{pytorch.FILE}, the released code's pickled module"),
    "nvidia": _Code(pytorch.find_nvidia, pytorch.read_nvidia, f"{pytorch.NVIDIA_FILES[0]}, of NVIDIA's examples"),
    "tensorflow": _Code(
        tensorflow.find, tensorflow.read, "a .safetensors file, as examples/tensorflow_checkpoint.py writes it"
    ),
}


class Imported(NamedTuple):
    """The result of `convert`: format, model and vocabulary."""

    form: str
    model: TransformerXL
    vocabulary: Vocabulary


def convert(
    source: Path, out: Path, words: Path | None = None, form: Format = "auto", lengths: Lengths | None = None
) -> Imported:
    """Convert a checkpoint of other code to one of txl, after comparing all its tensors with what
    its configuration requires.

    Args:
        source: a file or folder.
        out: the .safetensors file to write.
        words: file with a vocabulary; None for the vocabulary in the checkpoint or in its folder.
        form: the format; "auto" to detect it.
        lengths: lengths that a TensorFlow checkpoint does not store; not used for other formats.

    Raises:
        TxlError: something is missing, unknown, damaged or inconsistent; nothing is written.
    """
    try:
        return _convert(source, out, words, form, lengths or Lengths())
    except TxlError as error:
        if str(source) in str(error) or str(out) in str(error) or (words is not None and str(words) in str(error)):
            raise
        raise TxlError(f"{source}: {error}") from error
    except Exception as error:  # a hostile file can raise anything
        reason = " ".join(str(error).split())[:200]
        raise TxlError(
            f"{source}: not a checkpoint as its code writes it ({type(error).__name__}: {reason})"
        ) from error


def _convert(source: Path, out: Path, words: Path | None, form: Format, lengths: Lengths) -> Imported:
    name, where = _find(source, form)
    if name != "tensorflow" and lengths != Lengths():
        raise TxlError(f"{source}: its lengths of memory and segments are known; give them for TensorFlow's only")
    read = _CODES[name].read(where, lengths)
    segment = read.segment
    if type(segment) is not int or not 1 <= segment <= MAX_SIZE:
        raise TxlError(f"{source}: the length of training's segments must be from 1 to {MAX_SIZE:,}, got {segment!r}")
    model, listed = _model(read, str(source)), _vocabulary(read, words, source)
    state = {"attn_len": read.config.attn_len(segment), "segment": segment, "imported": f"{name}: {source}"}
    checkpoints.save(out, model, listed, state, {})
    return Imported(name, model, listed)


def _find(source: Path, form: Format) -> tuple[str, Path]:
    """Return the format and the argument of its `read`."""
    if form not in FORMATS:
        raise TxlError(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    tried = [form] if form != "auto" else list(_CODES)
    for name in tried:
        found = _CODES[name].find(source)
        if found is not None:
            return name, found
    if not source.exists():
        raise TxlError(f"{source}: no such file or folder")
    raise TxlError(f"{source}: not a checkpoint that is known: {'; '.join(_CODES[name].looks for name in tried)}")


def _model(read: Foreign, what: str) -> TransformerXL:
    if read.config.n_layer > len(read.tensors):
        raise TxlError(f"{what}: the configuration needs {read.config.n_layer:,} layers, more than there are tensors")
    with torch.device("meta"):  # a damaged file could name sizes that do not fit into memory
        shapes = {name: p.shape for name, p in TransformerXL(read.config).named_parameters()}
    found = translate(read.tensors, read.config, shapes, read.flipped_clusters, what)
    model = TransformerXL(read.config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(found[name])
    return model


def _vocabulary(read: Foreign, words: Path | None, source: Path) -> Vocabulary:
    if words is not None and not words.is_file():
        raise TxlError(f"{words}: no such file")
    if words is None and read.vocabulary is None:
        raise TxlError(f"{source}: holds no vocabulary ({', '.join(vocabulary.FILES)}); pass one with --vocabulary")
    try:
        found = vocabulary.read(words) if words is not None else read.vocabulary()  # type: ignore[misc]
        if len(found) != read.config.vocab_size:
            raise TxlError(
                f"{words or source}: has {len(found):,} words, the configuration needs {read.config.vocab_size:,}"
            )
    except TxlError as error:
        raise TxlError(f"{error}; pass another with --vocabulary") from error
    return found


def export(source: AnyPath, folder: Path) -> None:
    """Write config.json, model.safetensors and vocab.txt, as transformers up to 4.x and `txl.hf`
    read them. On an error, no file is written.

    Args:
        source: a checkpoint or a run's folder.
        folder: a folder that does not exist or is empty.

    Raises:
        TxlError: the model is not one that transformers' TransfoXL supports, or the folder is not
            empty.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or folder.is_symlink() or any(folder.iterdir())):
        raise TxlError(f"{folder}: exists already; choose another folder")
    network, checkpoint = checkpoints.restore(source)
    model = as_transformer(network, "export")
    config = huggingface.to_theirs(model.config, str(checkpoint.path))
    words = checkpoint.vocabulary
    config[vocabulary.SETTINGS] = words.settings()
    if isinstance(words, WordVocabulary):
        listed, config["eos_token_id"] = list(words.words), words.start
    else:
        listed = [str(byte) for byte in words.symbols]  # decimal numbers, as in the original preparation of enwik8
    tensors = huggingface.prefixed(original(dict(model.named_parameters()), model.config))
    text = json.dumps({"architectures": ["TransfoXLLMHeadModel"]} | config, indent=2, sort_keys=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent, folder.name)
        with new_folder(folder) as fresh:
            with replaced(fresh / "model.safetensors") as file:
                checkpoints.write_tensors(file, {name: x.detach() for name, x in tensors.items()}, {"format": "pt"})
            replace_text(fresh / "vocab.txt", "".join(f"{word}\n" for word in listed))
            replace_text(fresh / "config.json", text + "\n")
    except OSError as error:
        raise TxlError(f"{folder}: cannot be written: {error.strerror or error}") from error
