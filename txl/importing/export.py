"""From one of our checkpoints to a folder that Hugging Face's TransfoXL reads."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from txl.errors import TxlError
from txl.importing.huggingface import prefixed
from txl.importing.huggingface_config import to_theirs
from txl.importing.names import original
from txl.importing.vocabulary import SETTINGS
from txl.model import as_transformer
from txl.paths import AnyPath
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints

WORDS = "vocab.txt"


def export(source: AnyPath, folder: Path) -> None:
    """Writes config.json, model.safetensors and vocab.txt, as transformers up to 4.x and `txl.hf`
    read them.

    Args:
        source: a checkpoint or a run.
        folder: a new one, or an empty one.

    Raises:
        TxlError: the model is none of that class, or the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TxlError(f"{folder}: exists already; choose another folder")
    network, checkpoint = checkpoints.restore(source)
    model = as_transformer(network, "export")
    config = to_theirs(model.config, str(checkpoint.path))
    listed = words(checkpoint.vocabulary)
    config[SETTINGS] = checkpoint.vocabulary.settings()
    if isinstance(checkpoint.vocabulary, WordVocabulary):
        config["eos_token_id"] = checkpoint.vocabulary.start
    tensors = prefixed(original(dict(model.named_parameters()), model.config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: x.detach().clone() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        (folder / WORDS).write_text("".join(f"{word}\n" for word in listed), encoding="utf-8")
        text = json.dumps({"architectures": ["TransfoXLLMHeadModel"]} | config, indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise TxlError(f"{folder}: cannot be written: {error}") from error


def words(vocabulary: Vocabulary) -> list[str]:
    """A line for each token; of bytes their numbers, as the original prepares enwik8."""
    if isinstance(vocabulary, ByteVocabulary):
        return [str(byte) for byte in vocabulary.symbols]
    assert isinstance(vocabulary, WordVocabulary)
    return list(vocabulary.words)
