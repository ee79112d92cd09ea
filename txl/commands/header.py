"""What a training is of, in a line."""

import torch

from txl.model.config import Config, ModelConfig, RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import count_parameters
from txl.training.trainer import Trainer
from txl_kernels.backends import choose_unasked


def header(trainer: Trainer) -> str:
    """Model, parameters, what computes it, tokens an update, and the updates there are to do."""
    config, training = trainer.model.config, trainer.config
    size = f"{config.n_layer} layers x {config.d_model}, {count_parameters(trainer.model) / 1e6:.2f}M parameters"
    tokens = training.batch * training.scored * training.accumulate
    dtype = trainer.updater.dtype
    taken = "torch"
    if not isinstance(trainer.model, RecurrentNetwork):
        width = getattr(trainer.model.layers[0].attention, "kernel_width", trainer.model.config.d_head)
        taken = _attention(trainer.model.config, width, trainer.device, dtype)
    by = _computed_by(taken, trainer.device, dtype, trainer.world.size)
    return f"{_kind(config)}, {size}; {by}; {tokens:,} tokens an update; updates {trainer.step:,} to {training.steps:,}"


def _kind(config: Config) -> str:
    if isinstance(config, RecurrentConfig):
        return config.network.upper()
    kind = "Transformer-XL" if config.encoding == "relative" else f"Transformer with {config.encoding} positions"
    return kind if config.mem_len else f"{kind}, without memory"


def _attention(config: ModelConfig, width: int, device: torch.device, dtype: torch.dtype | None) -> str:
    """What computes attention with heads of a width."""
    if config.absolute:  # ours has positions in the scores
        return "torch's attention"
    return f"{choose_unasked(device, dtype or torch.float32, width)} backend"


def _computed_by(taken: str, device: torch.device, dtype: torch.dtype | None, processes: int) -> str:
    """That, on which device or how many threads, in how many processes, and autocast's dtype."""
    if device.type == "cuda":
        count = "" if processes == 1 else f"{processes} x "
        where = f"{taken} on {count}{torch.cuda.get_device_name(device)}"
    else:
        threads = torch.get_num_threads()
        count = "" if processes == 1 else f"{processes} processes, "
        where = f"{taken}, {count}{threads} thread{'' if threads == 1 else 's'}{' each' if count else ''}"
    return where if dtype is None else f"{where}, {str(dtype).removeprefix('torch.')}"
