"""Named settings of `txl generate`, and what of them a model takes."""

from dataclasses import dataclass

from txl.errors import TxlError
from txl.evaluation.evaluate import default_method
from txl.evaluation.generate import Sampling
from txl.language_model import LanguageModel
from txl.model.config import ModelConfig


@dataclass(frozen=True)
class Settings:
    """How a text is continued; arguments of `LanguageModel.stream`, None for the model's own."""

    count: int
    sampling: Sampling
    attn_len: int | None = None
    clamp_len: int | None = None
    zeros: bool | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usual:
    """What is taken where nothing is said. count: tokens to generate."""

    count: int = 500
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen


@dataclass(frozen=True, kw_only=True)
class Preset(Usual):
    """A published way to generate.

    Attributes:
        context: tokens of the split that are continued.
        mem_len: states remembered, zeros at first; so a token sees mem_len + 1 keys.
    """

    context: int
    mem_len: int
    clamp_len: int


USUAL = Usual()
PRESETS = {
    # The authors' own script; they showed texts of 500 and of 1,000 tokens.
    "paper": Preset(count=500, sampling=Sampling(1.0, top_k=40), context=512, mem_len=1600, clamp_len=1000),
}


def find(name: str) -> Preset:
    if name not in PRESETS:
        raise TxlError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def fitted(preset: Preset, asked: Settings, saved: LanguageModel) -> tuple[Settings, str | None]:
    """What was asked for, and for the rest of it the preset's memory where the model can have it.

    Returns:
        The settings, and a line on what of the preset does not apply; None if all does.
    """
    config = saved.model.config
    if not isinstance(config, ModelConfig):
        return asked, f"memory and clamp_len of the preset do not apply: the {config.network} carries its own state"
    if default_method(saved.model) != "cached":
        window = saved.segment if asked.attn_len is None else asked.attn_len
        why = f"encoding {config.encoding!r}, mem_len {config.mem_len}"
        return asked, f"memory and clamp_len of the preset do not apply ({why}): a window of {window} tokens is read"
    relative = config.encoding == "relative"
    settings = Settings(
        asked.count,
        asked.sampling,
        preset.mem_len + 1 if asked.attn_len is None else asked.attn_len,
        preset.clamp_len if asked.clamp_len is None and relative else asked.clamp_len,
        True if asked.zeros is None else asked.zeros,
        asked.stop,
    )
    if relative or asked.clamp_len is not None:
        return settings, None
    return settings, f"clamp_len of the preset does not apply to encoding {config.encoding!r}"
