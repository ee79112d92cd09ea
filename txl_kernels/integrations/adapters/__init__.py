"""Adapters, one file for each library: its attention in terms of `rel_attention`."""

from txl_kernels.integrations.adapters import (
    ding,
    enformer,
    espnet,
    fireredasr,
    gemma,
    granite,
    inkling,
    mpnet,
    mpt,
    nemo,
    rllib,
    speechbrain,
    speecht5,
    t5,
    transformers,
    wavlm,
    wenet,
    x_transformers,
    zipformer,
)

KNOWN = (
    *transformers.PEERS, *t5.PEERS, *mpnet.PEERS, *wavlm.PEERS, *speecht5.PEERS, *mpt.PEERS, *gemma.PEERS,
    *granite.PEERS, *inkling.PEERS, *nemo.PEERS, *espnet.PEERS, *wenet.PEERS, *fireredasr.PEERS, *speechbrain.PEERS,
    *enformer.PEERS, *ding.PEERS, *rllib.PEERS, *zipformer.PEERS, *x_transformers.PEERS,
)  # fmt: skip
