"""LSTM and QRNN: by definition, against torch's modules, in training and evaluation."""

import numpy as np
import pytest
import torch
from torch import nn

from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, evaluate
from txl.model.config import RecurrentConfig, config_from_json
from txl.model.recurrent import QRNNLayer, RecurrentNetwork, has_bf16_lstm
from txl.training.config import TrainConfig
from txl.training.optimizers import layer_matrices
from txl.training.trainer import Trainer


def small(network: str, **options: object) -> RecurrentNetwork:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_layer": 3, "d_model": 12, "d_inner": 20, "dropout": 0.0}
    return RecurrentNetwork(RecurrentConfig(network=network, **(sizes | options))).double().eval()


@pytest.mark.parametrize("window", [1, 2])
def test_qrnn_layer_equals_a_loop(window):
    torch.manual_seed(1)
    layer = QRNNLayer(5, 4, window).double()
    x = torch.randn(2, 7, 5).double()
    weight, bias = layer.gates.weight, layer.gates.bias
    c, h = torch.zeros(2, 4).double(), []
    for t in range(7):
        y = x[:, t] @ weight[:, :5].T + bias
        if window == 2:
            y = y + (x[:, t - 1] if t else torch.zeros(2, 5).double()) @ weight[:, 5:].T
        z, f, o = torch.tanh(y[:, :4]), torch.sigmoid(y[:, 4:8]), torch.sigmoid(y[:, 8:])
        c = f * z + (1 - f) * c
        h.append(o * c)
    out, state = layer.advance(x, layer.begin(x))
    torch.testing.assert_close(out, torch.stack(h, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[0], c, rtol=1e-12, atol=1e-12)


def test_lstm_equals_that_of_torch():
    model = small("lstm", d_inner=12)
    theirs = nn.LSTM(12, 12, 3, batch_first=True).double()
    named = {}
    for i, block in enumerate(model.blocks):
        named |= {name.replace("_l0", f"_l{i}"): p for name, p in block.named_parameters()}
    theirs.load_state_dict(named)
    tokens = torch.randint(31, (2, 9))
    torch.testing.assert_close(model.read(tokens).hidden, theirs(model.embedding(tokens))[0])


@pytest.mark.parametrize("network", ["lstm", "qrnn"])
def test_segments_equal_one_pass(network):
    model = small(network)
    tokens = torch.randint(31, (2, 13))
    whole, parts, memory = model.read(tokens), [], None
    for part in tokens.split([5, 1, 7], 1):
        states = model.read(part, memory)
        memory = states.memory
        parts.append(states.hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole.hidden, rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(memory, whole.memory, strict=True))
    assert not any(part.requires_grad for part in memory)


@pytest.mark.parametrize("network", ["lstm", "qrnn"])
@pytest.mark.parametrize("segment", [3, 8])
def test_evaluation_carries_the_state_of_each_stream(network, segment):
    model = small(network)
    text = np.random.default_rng(0).integers(0, 31, 50).astype(np.uint8)
    score = evaluate(model, text, 5, Reading(1, segment=segment), batch=2)
    total = 0.0
    for first, last in ((0, 25), (25, 50)):
        known = np.concatenate([[5] if first == 0 else text[first - 1 : first], text[first : last - 1]])
        with torch.no_grad():
            hidden = model.read(torch.from_numpy(known.astype(np.int64)).unsqueeze(0)).hidden
            wanted = torch.from_numpy(text[first:last].astype(np.int64)).unsqueeze(0)
            total += float(model.softmax.nll(hidden, wanted).sum())
    assert score.nats == pytest.approx(total / 50, rel=1e-9)


@pytest.mark.parametrize("network", ["lstm", "qrnn"])
def test_arguments_of_read(network):
    model = small(network)
    tokens = torch.randint(31, (2, 9))
    whole = model.read(tokens)
    part = model.read(tokens, last=2, mem_len=0)
    assert part.memory is None
    assert torch.equal(part.hidden, whole.hidden[:, -2:])
    dropped = small(network, dropout=0.5, output_dropout=0.0).train()
    last, made = dropped.blocks[-1], []
    advance = last.advance
    last.advance = lambda *x: made.append(advance(*x)) or made[-1]
    assert torch.equal(dropped.read(tokens).hidden, made[0][0])  # what leaves the last layer has its own dropout


def test_decayed_parameters():
    model = small("lstm")
    decayed = {id(p) for p in layer_matrices(model)}
    names = [name for name, p in model.named_parameters() if id(p) in decayed]
    assert len(names) == 6
    assert all("weight" in name and name.startswith("blocks") for name in names)


def test_qrnn_keeps_float32_under_autocast():
    layer = QRNNLayer(8, 8, 1)
    x = torch.randn(1, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = layer.advance(x, layer.begin(x))
    assert out.dtype == state[0].dtype == torch.float32


def test_bf16_on_a_cpu_whose_lstm_has_none(corpus, tmp_path):
    config = config_from_json({"network": "lstm", "vocab_size": len(corpus.vocabulary), "d_model": 8, "d_inner": 8})
    training = TrainConfig(steps=2, batch=2, tgt_len=8, precision="bf16")
    if has_bf16_lstm():
        Trainer(tmp_path / "run", corpus, config, training).advance(1)
    else:
        with pytest.raises(TxlError, match="precision must be 'fp32' for an LSTM on this CPU"):
            Trainer(tmp_path / "run", corpus, config, training)
        assert not (tmp_path / "run").exists()


def test_invalid_arguments():
    with pytest.raises(TxlError, match="an LSTM or QRNN has no n_head"):
        config_from_json({"network": "lstm", "vocab_size": 9, "n_head": 2})
    with pytest.raises(TxlError, match="network must be one of lstm, qrnn, got 'gru'"):
        config_from_json({"network": "gru", "vocab_size": 9})
    with pytest.raises(ValueError, match="ext_len must be 0 for a qrnn, got 2"):
        small("qrnn").read(torch.zeros(1, 4, dtype=torch.long), ext_len=2)
    model = small("lstm")
    memory = model.read(torch.zeros(1, 4, dtype=torch.long)).memory
    with pytest.raises(ValueError, match="memory must be for a batch of 2, got 1"):
        model.read(torch.zeros(2, 4, dtype=torch.long), memory)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"loss": "half"}, "cannot read tokens again"),
        ({"ext_len": 4}, "cannot read tokens again"),
        ({"recompute": True}, "recompute is for Transformers"),
        ({"compile": True}, "compile is for Transformers"),
        ({"intermediate_losses": True}, "intermediate_losses is for Transformers"),
        ({"optimizer": "muon"}, "optimizer 'muon' is for Transformers"),
    ],
)
def test_invalid_training_options(option, words, corpus, tmp_path):
    config = config_from_json({"network": "lstm", "vocab_size": len(corpus.vocabulary), "d_model": 8, "d_inner": 8})
    with pytest.raises(TxlError, match=words):
        Trainer(tmp_path / "run", corpus, config, TrainConfig(batch=2, tgt_len=16, **option))
