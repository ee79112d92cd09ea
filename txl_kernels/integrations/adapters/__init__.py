"""One file an adapter: what each library's attention is, said in terms of `rel_attention`."""

from txl_kernels.integrations.adapters import (
    ding,
    espnet,
    espnet_legacy,
    espnet_transducer,
    fastspeech2,
    hf_conformer,
    labml,
    nemo,
    parakeet,
    rllib,
    speechbrain,
    xlnet,
)

KNOWN = (
    *hf_conformer.PEERS, *parakeet.PEERS, *fastspeech2.PEERS, *xlnet.PEERS, *nemo.PEERS, *espnet.PEERS,
    *espnet_legacy.PEERS, *espnet_transducer.PEERS, *speechbrain.PEERS, *ding.PEERS, *rllib.PEERS, *labml.PEERS,
)  # fmt: skip
