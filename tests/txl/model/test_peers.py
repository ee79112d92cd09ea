"""Against Hugging Face's TransfoXL, a Transformer-XL of other authors, with the same weights."""

import pytest
import torch
from hugging_face_model import SIZES, transfo_xl
from torch import Tensor

from txl import Engine, ModelConfig, TransformerXL
from txl.importing.huggingface import prefixed
from txl.importing.names import original

transformers = pytest.importorskip("transformers", reason="needs the `peers` extra: transformers==4.37.2")

VOCAB, LAYERS, WIDTH, HEADS, INNER, MEM = (
    SIZES[name] for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_inner", "mem_len")
)


def ours(theirs: torch.nn.Module, **options: object) -> TransformerXL:
    """The same weights in our model."""
    model = TransformerXL(
        ModelConfig(
            vocab_size=VOCAB, n_layer=LAYERS, d_model=WIDTH, n_head=HEADS, d_head=WIDTH // HEADS, d_inner=INNER, dropout=0.0,
            mem_len=MEM, **options,
        )
    ).eval()  # fmt: skip
    state = theirs.state_dict()
    with torch.no_grad():
        for name, mine in prefixed(original(dict(model.named_parameters()), model.config)).items():
            mine.copy_(state[name])
    return model


BINS = {"cutoffs": [10, 20, 35], "d_embed": 64}


def with_bins(div_val: int, tied: bool) -> tuple[torch.nn.Module, TransformerXL]:
    """Their adaptive model and ours with its weights."""
    options = {"div_val": div_val, **BINS}
    theirs = transfo_xl(**options, proj_share_all_but_first=tied)
    sizes = {**SIZES, **options, "dropout": 0.0}
    model = TransformerXL(ModelConfig(**sizes, initial_memory="zeros", tie_projs="tail" if tied else "none")).eval()
    with torch.no_grad():
        for mine, name in bins_names(model):
            mine.copy_(torch.cat([theirs.get_parameter(part) for part in name.split()]))
        for name, mine in prefixed(
            original(dict(model.blocks.named_parameters(prefix="blocks")), model.config)
        ).items():
            mine.copy_(theirs.get_parameter(name))
    return theirs, model


def bins_names(model: TransformerXL) -> list[tuple[torch.nn.Parameter, str]]:
    """Our parameters of embedding and softmax, and theirs; several names: one after the other."""
    softmax, embedding = model.softmax, model.embedding
    pairs = [(p, f"transformer.word_emb.emb_layers.{i}.weight") for i, p in enumerate(embedding.tables)]
    pairs += [(p, f"transformer.word_emb.emb_projs.{i}") for i, p in embedding.projections.items()]
    pairs += [(p, f"crit.out_projs.{i}") for i, p in softmax.projections.items()]
    biases = " ".join(f"crit.out_layers.{i}.bias" for i in range(len(embedding.tables)))
    pairs.append((softmax.bias, biases))
    return [*pairs, (softmax.cluster_weight, "crit.cluster_weight"), (softmax.cluster_bias, "crit.cluster_bias")]


@pytest.mark.parametrize("div_val", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_adaptive_input_and_softmax(div_val: int, tied: bool) -> None:
    theirs, model = with_bins(div_val, tied)
    first, second, targets = segments([7, 9, 9])
    past = theirs(first)
    want = theirs(second, mems=past.mems)
    states = model.read(second, model.read(first).memory)
    close(model.softmax.log_probs(states.hidden), want.prediction_scores)
    losses = theirs(second, mems=past.mems, labels=targets).losses
    nll = model.softmax.nll(states.hidden[:, :-1], targets[:, 1:])  # theirs shifts the labels itself
    close(nll.flatten().sort().values, losses.flatten().sort().values)  # theirs are in order of the bins
    losses.sum().backward()
    nll.sum().backward()
    for p, name in bins_names(model):
        close(p.grad, torch.cat([theirs.get_parameter(part).grad for part in name.split()]))


def segments(lengths: list[int], batch: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(VOCAB, (batch, n)) for n in lengths]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # their mask is float32 only


OPTIONS = {
    "plain": ({}, {}),
    "same_length": ({"same_length": True}, {"window": MEM}),
    "clamp_len": ({"clamp_len": 6}, {"clamp_len": 6}),
    "same_length and clamp_len": ({"same_length": True, "clamp_len": 4}, {"window": MEM, "clamp_len": 4}),
    "untied biases": ({"untie_r": True}, {"untie_r": True}),
    "pre-norm": ({"pre_lnorm": True}, {"pre_norm": True}),
}


@pytest.mark.parametrize("initial_memory", ["zeros", "empty"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_and_memories_over_several_segments(options: tuple[dict, dict], initial_memory: str) -> None:
    theirs = transfo_xl(**options[0])
    model = ours(theirs, initial_memory=initial_memory, **options[1])
    mems = None if initial_memory == "zeros" else [torch.zeros(0, 2, WIDTH) for _ in range(LAYERS)]
    memory = None
    with torch.no_grad():
        for tokens in segments([7, 7, 3, 12, 1]):
            want = theirs(tokens, mems=mems)
            logits, memory = model(tokens, memory)
            close(logits.log_softmax(-1), want.prediction_scores)
            assert memory is not None
            for a, b in zip(memory, want.mems, strict=True):
                close(a, b.transpose(0, 1))
            mems = want.mems


def test_gradients() -> None:
    theirs = transfo_xl()
    model = ours(theirs, initial_memory="zeros")
    first, second = segments([6, 6])
    mems = theirs(first).mems
    memory = model(first)[1]
    theirs(second, mems=mems).prediction_scores.square().sum().backward()
    model(second, memory)[0].log_softmax(-1).square().sum().backward()
    layer = theirs.transformer.layers[0].dec_attn
    block = model.layers[0].attention
    close(block.qkv.weight.grad, layer.qkv_net.weight.grad)
    close(block.r.weight.grad, layer.r_net.weight.grad)
    close(block.content_bias.grad, theirs.transformer.r_w_bias.grad)
    close(block.position_bias.grad, theirs.transformer.r_r_bias.grad)


@pytest.mark.parametrize("lengths", [[1] * 25, [5] * 5, [9, 1, 2, 13]], ids=str)
def test_cached_engine_against_their_hidden_states(lengths: list[int]) -> None:
    theirs = transfo_xl(same_length=True)
    engine = Engine(ours(theirs, initial_memory="zeros", window=MEM), 2, attn_len=MEM, max_segment=max(lengths))
    mems = None
    with torch.no_grad():
        for tokens in segments(lengths):
            want = theirs(tokens, mems=mems)
            mems = want.mems
            close(engine(tokens).log_softmax(-1), want.prediction_scores)
