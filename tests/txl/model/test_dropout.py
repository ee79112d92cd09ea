"""Variational and word dropout: what is dropped together, what is independent, what is expected."""

import torch
from model_helpers import small_config, small_model

from txl import TransformerXL
from txl.model.adaptive import AdaptiveEmbedding
from txl.model.transformer import VariationalDropout


def test_masks_are_constant_over_time_and_independent_over_the_batch() -> None:
    torch.manual_seed(0)
    dropped = VariationalDropout(0.3)(torch.ones(64, 50, 40))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    mask = dropped[:, 0]
    assert mask.unique().tolist() == [0.0, torch.tensor(1 / 0.7).item()]
    assert abs((mask == 0).float().mean() - 0.3) < 0.03
    assert torch.corrcoef(mask).fill_diagonal_(0).abs().max() < 0.6, "another mask for each text"
    assert not torch.equal(VariationalDropout(0.3)(torch.ones(2, 3, 40)), VariationalDropout(0.3)(torch.ones(2, 3, 40)))


def test_nothing_is_dropped_in_evaluation() -> None:
    x = torch.randn(2, 3, 4)
    assert VariationalDropout(0.5).eval()(x) is x
    assert VariationalDropout(0.0)(x) is x


def test_word_dropout_takes_all_of_a_words_occurrences() -> None:
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(small_config(word_dropout=0.4))
    torch.nn.init.ones_(embedding.tables[0])
    tokens = torch.randint(31, (8, 60))
    factors = embedding(tokens)[..., 0] / 4  # sqrt(d_model)
    for word in range(31):
        assert len(factors[tokens == word].unique()) == 1
    assert sorted(factors.unique().tolist()) == [0.0, torch.tensor(1 / 0.6).item()]


def test_where_the_penn_treebank_model_drops() -> None:
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
