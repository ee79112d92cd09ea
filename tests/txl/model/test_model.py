"""TransformerXL: sizes, memory, options, gradients, dropout."""

import copy

import pytest
import torch
from model_helpers import small_config, small_model

from txl import TransformerXL
from txl.model.adaptive import AdaptiveEmbedding
from txl.model.transformer import VariationalDropout, count_parameters


@pytest.mark.parametrize("length", [1, 3, 8, 20])
def test_memory_holds_the_last_states_of_every_layer(length: int) -> None:
    model = small_model()
    _, memory = model(torch.randint(31, (2, 5)))
    _, after = model(torch.randint(31, (2, length)), memory)
    assert after is not None
    assert [tuple(m.shape) for m in after] == [(2, min(5 + length, 8), 16)] * 2
    assert not any(m.requires_grad for m in after)


@pytest.mark.parametrize(
    ("options", "reach"), [({"mem_len": 0}, 16), ({"mem_len": 8}, 24), ({"mem_len": 8, "window": 5}, 5)], ids=str
)
def test_longest_attention_of_training(options: dict[str, int], reach: int) -> None:
    assert small_config(**options).attn_len(16) == reach


def test_zero_initial_memory_is_attended() -> None:
    tokens = torch.randint(31, (2, 5))
    zeros = small_model(initial_memory="zeros")
    empty = small_model()
    assert not torch.allclose(zeros(tokens)[0], empty(tokens)[0])
    explicit = tuple(torch.zeros(2, 8, 16, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(zeros(tokens)[0], empty(tokens, explicit)[0])


def test_initial_values_are_those_of_the_original() -> None:
    torch.manual_seed(0)
    model = TransformerXL(small_config(d_model=256, d_inner=512, n_layer=1))
    block = model.layers[0]
    for weight in (model.embedding.tables[0], block.attention.qkv.weight, block.feed_forward[0].weight):
        assert abs(weight.std() - 0.02) < 0.001
    assert abs(block.attention_norm.weight.mean() - 1) < 0.005
    assert abs(block.attention_norm.weight.std() - 0.02) < 0.004
    assert not block.feed_forward[0].bias.any()


def test_dropout_only_in_training() -> None:
    model, tokens = small_model(dropout=0.5, attn_dropout=0.5).float(), torch.randint(31, (2, 5))
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


def test_variational_masks() -> None:
    torch.manual_seed(0)
    dropped = VariationalDropout(0.3)(torch.ones(64, 50, 40))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    mask = dropped[:, 0]
    assert mask.unique().tolist() == [0.0, torch.tensor(1 / 0.7).item()]
    assert abs((mask == 0).float().mean() - 0.3) < 0.03
    assert torch.corrcoef(mask).fill_diagonal_(0).abs().max() < 0.6, "another mask for each text"
    assert not torch.equal(VariationalDropout(0.3)(torch.ones(2, 3, 40)), VariationalDropout(0.3)(torch.ones(2, 3, 40)))


def test_word_dropout_drops_all_occurrences() -> None:
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(small_config(word_dropout=0.4))
    torch.nn.init.ones_(embedding.tables[0])
    tokens = torch.randint(31, (8, 60))
    factors = embedding(tokens)[..., 0] / 4  # sqrt(d_model)
    for word in range(31):
        assert len(factors[tokens == word].unique()) == 1
    assert sorted(factors.unique().tolist()) == [0.0, torch.tensor(1 / 0.6).item()]


@pytest.mark.parametrize(("div_val", "compiled"), [(1, False), (2, False), (2, True)])
def test_tokens_out_of_range(div_val: int, compiled: bool) -> None:
    """Any number of tables raises IndexError for a token anywhere, also compiled."""
    model = small_model(cutoffs=(10, 20), div_val=div_val)
    torch._dynamo.reset()
    for way in (model.embedding, *(() if compiled else (model,))):
        embed = torch.compile(way, backend="eager") if compiled else way
        # Each bin and shape is compiled anew, more often than torch's default limit allows.
        with torch.no_grad(), torch._dynamo.config.patch(cache_size_limit=64):
            for wrong in ([1, 31, 2], [1, -1, 2], [-7, 1, 15], [5, 15, 10**12], [25, 15, -(10**12)]):
                with pytest.raises(IndexError, match="out of range"):
                    embed(torch.tensor([wrong]))
            with pytest.raises(IndexError, match="out of range"):
                embed(torch.tensor([[31, 1]], dtype=torch.int32))
            embed(torch.tensor([[0, 9, 10, 19, 20, 30]]))


def test_dropout_of_the_penn_treebank_model() -> None:
    """Embeddings, attention output, feed-forward hidden units and output, final states."""
    model = TransformerXL(
        small_config(
            variational_dropout=True, dropout=0.25, embedding_dropout=0.4, output_dropout=0.1, word_dropout=0.1
        )
    )
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, VariationalDropout)}
    assert rates == {
        "embedding_dropout": 0.4, "output_dropout": 0.1, "blocks.0.dropout": 0.25, "blocks.1.dropout": 0.25,
        **{f"blocks.{n}.feed_forward.{i}": 0.25 for n in (0, 1) for i in (2, 4)},
    }  # fmt: skip
    assert model.position_dropout.p == 0.0


def test_memory_keeps_the_masks_it_was_made_with() -> None:
    model = small_model(variational_dropout=True, dropout=0.5, mem_len=6).train()
    memory = model.read(torch.randint(31, (2, 6))).memory
    zero = memory[0] == 0  # embeddings' features that the first segment's mask took
    assert torch.equal(zero, zero[:, :1].expand_as(zero))
    assert zero.any()
    after = model.read(torch.randint(31, (2, 3)), memory).memory[0]
    assert torch.equal(after[:, :3], memory[0][:, 3:])
    assert not torch.equal(after[:, 3] == 0, zero[:, 0]), "the next segment draws its own"


def test_invalid_inputs() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"tokens must be \[B, L\] with L >= 1, got shape \[2, 0\]"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="memory must be 2 tensors for a batch of 3, got 2 for 1"):
        model(torch.zeros(3, 2, dtype=torch.long), model(torch.zeros(1, 2, dtype=torch.long))[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cutoffs": (4, 9), "div_val": 2, "tie_projs": "tail"},
        {"encoding": "shaw", "table_len": 5},
        {"encoding": "shaw-released", "table_len": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["to_empty", "assign", "deepcopy", "half"])
def test_tied_weights_stay_tied(options: dict[str, object], how: str) -> None:
    model = small_model(**options)
    state, count = model.state_dict(), count_parameters(model)
    if how == "to_empty":
        with torch.device("meta"):
            other = TransformerXL(model.config)
        other.to_empty(device="cpu")
        other.double().load_state_dict(state)
    elif how == "assign":
        other = TransformerXL(model.config)
        other.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    elif how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        other = copy.deepcopy(model).float().double()
    assert count_parameters(other) == count
    assert other.softmax.tables[0] is other.embedding.tables[0]
    tokens = torch.randint(31, (2, 9))
    torch.testing.assert_close(other.eval()(tokens)[0], model(tokens)[0], rtol=1e-4, atol=1e-4)
