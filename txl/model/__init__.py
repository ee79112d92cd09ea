"""The language models of the paper: their configurations, modules and networks."""

from txl.errors import TxlError
from txl.model.config import Config, RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import TransformerXL

Network = TransformerXL | RecurrentNetwork


def make_network(config: Config) -> Network:
    """Make the network of a configuration; initial parameters are drawn from torch's generator."""
    return RecurrentNetwork(config) if isinstance(config, RecurrentConfig) else TransformerXL(config)


def as_transformer(network: Network, what: str) -> TransformerXL:
    """Return the network if it is a Transformer.

    what: the feature that needs one, for the message.

    Raises:
        TxlError: it is an LSTM or QRNN.
    """
    if isinstance(network, TransformerXL):
        return network
    raise TxlError(f"{what} is for Transformers, not for a network of kind {network.config.network!r}")
