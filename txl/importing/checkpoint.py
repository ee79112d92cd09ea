"""From another code's checkpoint to one of ours."""

from pathlib import Path

import torch

from txl.errors import TxlError
from txl.importing import huggingface, vocabulary
from txl.importing.names import translate
from txl.model.transformer import TransformerXL
from txl.training import checkpoint as checkpoints


def convert(source: Path, out: Path, words: Path | None = None) -> TransformerXL:
    """Reads a checkpoint, compares all it holds with what its configuration needs, writes ours.

    Args:
        source: a folder that transformers' TransfoXL saved.
        out: the .safetensors file to write.
        words: a vocabulary's file; None for the one in the folder.

    Raises:
        TxlError: anything missing, unknown, damaged or in disagreement; nothing is written.
    """
    if not source.is_dir() or not huggingface.is_one(source):
        raise TxlError(
            f"{source}: not a checkpoint that is known: a folder with config.json, as transformers saves TransfoXL"
        )
    config = huggingface.config(source)
    listed = words or huggingface.vocabulary_file(source)
    if listed is None:
        names = ", ".join(huggingface.VOCABULARIES)
        raise TxlError(f"{source}: holds no vocabulary ({names}); pass one with --vocabulary")
    if not listed.is_file():
        raise TxlError(f"{listed}: no such file")
    read = vocabulary.read(listed)
    if len(read) != config.vocab_size:
        raise TxlError(f"{listed}: has {len(read):,} words, the configuration needs {config.vocab_size:,}")
    with torch.device("meta"):  # nothing is allocated for sizes that the file does not have
        shapes = {name: p.shape for name, p in TransformerXL(config).named_parameters()}
    found = translate(huggingface.tensors(source), config, shapes, False, str(source))
    model = TransformerXL(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(found[name])
    segment = huggingface.SEGMENT
    state = {"attn_len": config.attn_len(segment), "segment": segment, "imported": str(source)}
    checkpoints.save(out, model, read, state, {})
    return model
