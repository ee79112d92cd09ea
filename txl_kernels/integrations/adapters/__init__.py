"""One file a library: what its attention is, said in terms of `rel_attention`."""

from txl_kernels.integrations.adapters import (
    ding,
    enformer,
    espnet,
    fireredasr,
    granite,
    labml,
    nemo,
    rllib,
    speechbrain,
    transformers,
    wenet,
)

KNOWN = (
    *transformers.PEERS, *granite.PEERS, *nemo.PEERS, *espnet.PEERS, *wenet.PEERS, *fireredasr.PEERS, *speechbrain.PEERS,
    *enformer.PEERS, *ding.PEERS, *rllib.PEERS, *labml.PEERS,
)  # fmt: skip
