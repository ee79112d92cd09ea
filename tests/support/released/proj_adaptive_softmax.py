"""The released softmax's parameters, under their names; computes nothing."""

import torch
from torch import nn


class ProjectedAdaptiveLogSoftmax(nn.Module):
    def __init__(self, n_token, d_embed, d_proj, cutoffs, div_val=1):
        super().__init__()
        self.n_token, self.d_embed, self.d_proj, self.div_val = n_token, d_embed, d_proj, div_val
        self.cutoffs = [*cutoffs, n_token]
        self.cutoff_ends = [0, *self.cutoffs]
        self.shortlist_size, self.n_clusters = self.cutoffs[0], len(cutoffs)
        self.head_size, self.keep_order = self.shortlist_size + self.n_clusters, False
        if self.n_clusters:
            self.cluster_weight = nn.Parameter(torch.zeros(self.n_clusters, d_embed))
            self.cluster_bias = nn.Parameter(torch.zeros(self.n_clusters))
        self.out_layers, self.out_projs = nn.ModuleList(), nn.ParameterList()
        if div_val == 1:
            for _ in self.cutoffs:
                self.out_projs.append(nn.Parameter(torch.zeros(d_proj, d_embed)) if d_proj != d_embed else None)
            self.out_layers.append(nn.Linear(d_embed, n_token))
            return
        for i in range(len(self.cutoffs)):
            width = d_embed // div_val**i
            self.out_projs.append(nn.Parameter(torch.zeros(d_proj, width)))
            self.out_layers.append(nn.Linear(width, self.cutoff_ends[i + 1] - self.cutoff_ends[i]))
