"""One file a library: what its attention is, said in terms of `rel_attention`."""

from txl_kernels.integrations.adapters import ding, espnet, labml, nemo, rllib, speechbrain, transformers

KNOWN = (
    *transformers.PEERS, *nemo.PEERS, *espnet.PEERS, *speechbrain.PEERS, *ding.PEERS, *rllib.PEERS, *labml.PEERS,
)  # fmt: skip
