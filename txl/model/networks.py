"""Every kind of network that can be trained, made from its configuration."""

from dataclasses import fields
from typing import Any

from txl.errors import TxlError
from txl.model.config import ModelConfig
from txl.model.recurrent import RecurrentNetwork
from txl.model.recurrent_config import KINDS, RecurrentConfig
from txl.model.transformer import TransformerXL

Network = TransformerXL | RecurrentNetwork
Config = ModelConfig | RecurrentConfig


def make_network(config: Config) -> Network:
    """With initial parameters drawn from torch's generator."""
    return RecurrentNetwork(config) if isinstance(config, RecurrentConfig) else TransformerXL(config)


def config_from_json(values: dict[str, Any]) -> Config:
    """What `to_json` gave; "network" names an LSTM or QRNN, without it it is a Transformer.

    Raises:
        TxlError: a field is unknown to that network, missing, or out of range.
    """
    if "network" not in values:
        return ModelConfig.from_json(values)
    if values["network"] not in KINDS:
        raise TxlError(f"network must be one of {', '.join(KINDS)}, got {values['network']!r}")
    known = {f.name for f in fields(RecurrentConfig)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise TxlError(f"a network of kind {values['network']!r} has no {', '.join(unknown)}")
    return RecurrentConfig.from_json(values)


def as_transformer(network: Network, what: str) -> TransformerXL:
    """The network, if it is a Transformer; what: that needs one, for the message.

    Raises:
        TxlError: it is an LSTM or QRNN.
    """
    if isinstance(network, TransformerXL):
        return network
    raise TxlError(f"{what} is for Transformers, not for a network of kind {network.config.network!r}")
