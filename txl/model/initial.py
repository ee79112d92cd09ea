"""Initial parameters, as the released code draws them."""

from torch import nn

from txl.model.block import Block
from txl.model.config import ModelConfig
from txl.model.embedding import AdaptiveEmbedding
from txl.model.network_config import NetworkConfig
from txl.model.shaw import ReleasedShawAttention, ShawAttention
from txl.model.softmax import AdaptiveSoftmax
from txl_kernels import RelAttention


def init_parameters(model: nn.Module, config: ModelConfig) -> None:
    """Draws every parameter of a model from torch's generator."""
    for module in model.modules():
        init_module(module, config)


def init_module(module: nn.Module, config: ModelConfig) -> None:
    """Draws what a module holds itself, its children's parameters apart; of embeddings and softmax
    all."""
    std = config.init_std
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, 1.0, config.norm_std)
        nn.init.zeros_(module.bias)
    elif isinstance(module, RelAttention):
        nn.init.normal_(module.content_bias, 0.0, std)
        nn.init.normal_(module.position_bias, 0.0, std)
    elif isinstance(module, ShawAttention):
        nn.init.normal_(module.table, 0.0, std)
        if isinstance(module, ReleasedShawAttention):
            nn.init.normal_(module.content_bias, 0.0, std)
            nn.init.zeros_(module.distance_bias)
    elif isinstance(module, Block) and module.places is not None:
        nn.init.normal_(module.places, 0.0, std)
    elif isinstance(module, (AdaptiveEmbedding, AdaptiveSoftmax)):
        init_tables(module, config)


def init_tables(module: AdaptiveEmbedding | AdaptiveSoftmax, config: NetworkConfig) -> None:
    """Draws all that embeddings or softmax hold."""
    if isinstance(module, AdaptiveEmbedding):
        draw(module.tables, config)
        draw(module.projections, config)
        return
    draw(module.own_tables, config)
    draw(module.own_projections, config)
    nn.init.zeros_(module.bias)
    if len(module.bins) > 1:
        nn.init.normal_(module.cluster_weight, 0.0, config.init_std)
        nn.init.zeros_(module.cluster_bias)


def draw(parameters: nn.ParameterList | nn.ParameterDict, config: NetworkConfig) -> None:
    """Tables of embeddings, or their projections."""
    if isinstance(parameters, nn.ParameterList):
        for table in parameters:
            nn.init.normal_(table, 0.0, config.init_std)
    else:
        for projection in parameters.values():
            nn.init.normal_(projection, 0.0, config.proj_init_std)
