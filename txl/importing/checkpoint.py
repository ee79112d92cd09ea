"""Conversion of other code's checkpoints to txl's, and export for transformers."""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from txl.errors import TxlError
from txl.importing import huggingface, pickles, pytorch, tensorflow, vocabulary
from txl.importing.names import Foreign, Lengths, number, original, translate
from txl.model import as_transformer
from txl.model.config import MAX_SIZE
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath, new_folder, replace_text, replaced
from txl.text.vocabulary import Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints

_FILES = ("config.json", "model.pt", "checkpoint_best.pt", "checkpoint_last.pt")  # of a folder
_KNOWN = (
    "a folder with config.json (transformers), model.pt (PyTorch), checkpoint_best.pt (NVIDIA), or a .safetensors file, "
    "made of TensorFlow's files by python examples/tensorflow_checkpoint.py PREFIX OUT.safetensors (docs/how-to/import.md)"
)


class Imported(NamedTuple):
    """The result of `convert`: format, model and vocabulary."""

    form: str
    model: TransformerXL
    vocabulary: Vocabulary


def convert(source: Path, out: Path, words: Path | None = None, lengths: Lengths | None = None) -> Imported:
    """Convert a checkpoint of other code to one of txl, after comparing all its tensors with what
    its configuration requires.

    Args:
        source: a file or folder.
        out: the .safetensors file to write.
        words: file with a vocabulary; None for the vocabulary in the checkpoint or in its folder.
        lengths: lengths that a TensorFlow checkpoint does not store; not used for other formats.

    Raises:
        TxlError: something is missing, unknown, damaged or inconsistent; nothing is written.
    """
    try:
        form, read = _read(source, lengths or Lengths())
        if form != "tensorflow" and lengths not in (None, Lengths()):
            raise TxlError("its lengths of memory and segments are known; give them for TensorFlow's only")
        segment = read.segment
        if type(segment) is not int or not 1 <= segment <= MAX_SIZE:
            raise TxlError(f"the length of training's segments must be from 1 to {MAX_SIZE:,}, got {number(segment)!r}")
        model, listed = _model(read), _vocabulary(read, words, source)
    except TxlError as error:
        raise TxlError(f"{source}: {error}") from error
    except Exception as error:  # a hostile file can raise anything
        reason = " ".join(str(error).split())[:200]
        raise TxlError(
            f"{source}: not a checkpoint as its code writes it ({type(error).__name__}: {reason})"
        ) from error
    state = {"attn_len": read.config.attn_len(segment), "segment": segment, "imported": f"{form}: {source}"}
    checkpoints.save(out, model, listed, state, {})
    return Imported(form, model, listed)


def _read(source: Path, lengths: Lengths) -> tuple[str, Foreign]:
    """Return the format and the checkpoint."""
    if source.is_dir():
        found = [name for name in _FILES if (source / name).is_file()]
        if len({name.partition("_")[0] for name in found}) > 1:
            raise TxlError(f"holds checkpoints of several kinds, {', '.join(found)}: name the file")
        source = source / found[0] if found else source
    if source.suffix == ".safetensors" and source.is_file():
        return "tensorflow", tensorflow.read(source, lengths)
    if source.name == "config.json":
        return "huggingface", huggingface.read(source.parent)
    if not pickles.is_one(source):
        what = "not a checkpoint that is known" if source.exists() else "no such file or folder"
        raise TxlError(f"{what}; accepted are {_KNOWN}")
    held = pickles.load(source)
    return ("nvidia", pytorch.read_nvidia(held)) if isinstance(held, dict) else ("pytorch", pytorch.read(held))


def _model(read: Foreign) -> TransformerXL:
    if read.config.n_layer > len(read.tensors):
        raise TxlError(f"the configuration needs {read.config.n_layer:,} layers, more than there are tensors")
    with torch.device("meta"):  # a damaged file could name sizes that do not fit into memory
        shapes = {name: p.shape for name, p in TransformerXL(read.config).named_parameters()}
    found = translate(read.tensors, read.config, shapes)
    model = TransformerXL(read.config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(found[name])
    return model


def _vocabulary(read: Foreign, words: Path | None, source: Path) -> Vocabulary:
    path = words or (vocabulary.beside(source) if read.vocabulary is None else None)
    if path is None and read.vocabulary is None:
        raise TxlError(f"holds no vocabulary ({', '.join(vocabulary.FILES)}); pass one with --vocabulary")
    try:
        found = vocabulary.of(read.vocabulary) if path is None else vocabulary.read(path)
        if len(found) != read.config.vocab_size:
            raise TxlError(
                f"the vocabulary has {len(found):,} words, the configuration needs {read.config.vocab_size:,}"
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
    network, checkpoint = checkpoints.restore(source)
    model = as_transformer(network, "export")
    config = huggingface.to_theirs(model.config)
    words = checkpoint.vocabulary
    config |= {vocabulary.SETTINGS: words.settings(), huggingface.SEGMENT: checkpoint.segment}
    if isinstance(words, WordVocabulary):
        listed, config["eos_token_id"] = list(words.words), words.start
    else:
        listed = [str(byte) for byte in words.symbols]  # decimal numbers, as in the original preparation of enwik8
    tensors = huggingface.prefixed(original(dict(model.named_parameters()), model.config))
    text = json.dumps({"architectures": ["TransfoXLLMHeadModel"]} | config, indent=2, sort_keys=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as fresh:
            with replaced(fresh / "model.safetensors") as file:
                checkpoints.write_tensors(file, {name: x.detach() for name, x in tensors.items()}, {"format": "pt"})
            replace_text(fresh / "vocab.txt", "".join(f"{word}\n" for word in listed))
            replace_text(fresh / "config.json", text + "\n")
    except OSError as error:
        raise TxlError(f"{folder}: cannot be written: {error.strerror or error}") from error
