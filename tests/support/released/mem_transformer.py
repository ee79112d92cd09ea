"""Modules with the names and attributes of the paper's released PyTorch code, to make pickles; they
compute nothing."""

import torch
from proj_adaptive_softmax import ProjectedAdaptiveLogSoftmax
from torch import nn


class PositionalEmbedding(nn.Module):
    def __init__(self, demb):
        super().__init__()
        self.demb = demb
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, demb, 2.0) / demb)))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner, dropout, pre_lnorm):
        super().__init__()
        self.d_model, self.d_inner, self.dropout, self.pre_lnorm = d_model, d_inner, dropout, pre_lnorm
        first, second = nn.Linear(d_model, d_inner), nn.Linear(d_inner, d_model)
        self.CoreNet = nn.Sequential(first, nn.ReLU(inplace=True), nn.Dropout(dropout), second, nn.Dropout(dropout))
        self.layer_norm = nn.LayerNorm(d_model)


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model, d_head, dropout, dropatt, pre_lnorm):
        super().__init__()
        self.n_head, self.d_model, self.d_head, self.dropout = n_head, d_model, d_head, dropout
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.drop, self.dropatt = nn.Dropout(dropout), nn.Dropout(dropatt)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale, self.pre_lnorm = 1 / d_head**0.5, pre_lnorm
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)


class RelPartialLearnableDecoderLayer(nn.Module):
    def __init__(self, n_head, d_model, d_head, d_inner, dropout, dropatt, pre_lnorm):
        super().__init__()
        self.dec_attn = RelPartialLearnableMultiHeadAttn(n_head, d_model, d_head, dropout, dropatt, pre_lnorm)
        self.pos_ff = PositionwiseFF(d_model, d_inner, dropout, pre_lnorm)


class AdaptiveEmbedding(nn.Module):
    def __init__(self, n_token, d_embed, d_proj, cutoffs, div_val):
        super().__init__()
        self.n_token, self.d_embed, self.d_proj, self.div_val = n_token, d_embed, d_proj, div_val
        self.cutoffs, self.emb_scale = [*cutoffs, n_token], d_proj**0.5
        self.cutoff_ends = [0, *self.cutoffs]
        self.emb_layers, self.emb_projs = nn.ModuleList(), nn.ParameterList()
        if div_val == 1:
            self.emb_layers.append(nn.Embedding(n_token, d_embed))
            if d_proj != d_embed:
                self.emb_projs.append(nn.Parameter(torch.zeros(d_proj, d_embed)))
            return
        for i in range(len(self.cutoffs)):
            width = d_embed // div_val**i
            self.emb_layers.append(nn.Embedding(self.cutoff_ends[i + 1] - self.cutoff_ends[i], width))
            self.emb_projs.append(nn.Parameter(torch.zeros(d_proj, width)))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer, n_head, d_model, d_head, d_inner, dropout, dropatt, *, tie_weight, d_embed, div_val,
                 tie_projs, pre_lnorm, tgt_len, ext_len, mem_len, cutoffs, same_length, attn_type, clamp_len):  # fmt: skip
        super().__init__()
        self.n_token, self.d_embed, self.d_model, self.n_head, self.d_head = n_token, d_embed, d_model, n_head, d_head
        self.word_emb = AdaptiveEmbedding(n_token, d_embed, d_model, cutoffs, div_val)
        self.drop = nn.Dropout(dropout)
        self.n_layer, self.tgt_len, self.mem_len, self.ext_len = n_layer, tgt_len, mem_len, ext_len
        self.max_klen, self.attn_type = tgt_len + ext_len + mem_len, attn_type
        sizes = (n_head, d_model, d_head, d_inner, dropout, dropatt, pre_lnorm)
        self.layers = nn.ModuleList(RelPartialLearnableDecoderLayer(*sizes) for _ in range(n_layer))
        self.sample_softmax = -1
        self.crit = ProjectedAdaptiveLogSoftmax(n_token, d_embed, d_model, cutoffs, div_val)
        if tie_weight:
            for out, embedded in zip(self.crit.out_layers, self.word_emb.emb_layers, strict=True):
                out.weight = embedded.weight
        for i, tied in enumerate(tie_projs):
            if tied and div_val == 1 and d_model != d_embed:
                self.crit.out_projs[i] = self.word_emb.emb_projs[0]
            elif tied and div_val != 1:
                self.crit.out_projs[i] = self.word_emb.emb_projs[i]
        self.same_length, self.clamp_len = same_length, clamp_len
        self.pos_emb = PositionalEmbedding(d_model)
        self.r_w_bias = nn.Parameter(torch.zeros(n_head, d_head))
        self.r_r_bias = nn.Parameter(torch.zeros(n_head, d_head))
