"""The vocabulary of an old TransfoXL checkpoint as a fast tokenizer."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from txl.hf.weights import OF_THE_HUB, folder_of
from txl.importing import vocabulary
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary

_ASCII_SPACE = Regex(r"[ \t\n\r\x0b\x0c]+")


class TransfoXLTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Tokenizer that splits words at white space and maps a line end to `<eos>`, or, for a
    checkpoint with a byte vocabulary, maps bytes.

    The old tokenizer also applied Moses' rules to raw English; for text that is already split into
    words, such as WikiText, both give the same tokens.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the tokenizer of a folder with tokenizer.json, vocab.pkl, vocab.bin or vocab.txt;
        pickles are read without executing anything.

        Raises:
            OSError: the folder has none of these files.
            TxlError: the vocabulary is damaged or of another form.
        """
        name = str(pretrained_model_name_or_path)
        folder = folder_of(name, kwargs, ("*.json", *vocabulary.FILES))
        if (folder / "tokenizer.json").is_file():
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        found = vocabulary.beside(folder)
        if found is None:
            raise OSError(f"{name}: holds no tokenizer.json and no vocabulary ({', '.join(vocabulary.FILES)})")
        hub = (*OF_THE_HUB, "subfolder")
        own = {key: x for key, x in kwargs.items() if key not in hub and not key.startswith("_")}
        return cls.from_vocabulary(vocabulary.read(found), **own, name_or_path=name)

    @classmethod
    def from_vocabulary(cls, words: Vocabulary, **options: Any) -> "TransfoXLTokenizer":
        """Make the tokenizer of a vocabulary of `txl`; options as in transformers' tokenizers."""
        plain = {"clean_up_tokenization_spaces": False} | options
        if isinstance(words, ByteVocabulary):
            return cls(tokenizer_object=_of_bytes(words), **plain)
        unknown = None if words.unknown is None else words.words[words.unknown]
        named = {"eos_token": words.end} | ({} if unknown is None else {"unk_token": unknown})
        return cls(tokenizer_object=_of_words(words, unknown), **(named | plain))


def _of_words(words: WordVocabulary, unknown: str | None) -> Tokenizer:
    numbers = {word: n for n, word in enumerate(words.words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, **({} if unknown is None else {"unk_token": unknown})))
    steps = [normalizers.Lowercase()] if words.lower else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace("\n", f" {words.end} ")])
    unicode = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_ASCII_SPACE, "removed") if words.ascii_space else unicode
    return tokenizer


def _of_bytes(words: ByteVocabulary) -> Tokenizer:
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.WordLevel({characters[byte]: n for n, byte in enumerate(words.symbols)}))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([whole, pre_tokenizers.Split(Regex("."), "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
