"""Optimizers: one update by hand, decayed parameters, Muon's matrices."""

import pytest
import torch
from model_helpers import small_config, small_model
from torch import Tensor

from txl import TransformerXL
from txl.errors import TxlError
from txl.training.config import TrainConfig
from txl.training.optimizers import layer_matrices, make_optimizers
from txl.training.segments import SegmentTraining

SYSTEMS = {
    "relative": {}, "shaw": {"encoding": "shaw", "table_len": 5}, "sinusoid": {"encoding": "sinusoid"},
    "bins": {"cutoffs": (4, 9), "div_val": 2},
}  # fmt: skip


def with_gradients(**options: object) -> TransformerXL:
    model = small_model(**options)
    torch.manual_seed(1)
    SegmentTraining(model)(torch.randint(31, (2, 9)), torch.randint(31, (2, 9)), None).total.backward()
    return model


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_update_by_hand(options: dict[str, object], decay: float) -> None:
    """The first step of Adam (Kingma and Ba 2015), with decoupled decay (AdamW)."""
    model = with_gradients(**options)
    config = TrainConfig(lr=0.01, weight_decay=decay)
    decayed = {id(p) for p in layer_matrices(model)}
    want: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        m, v = 0.1 * p.grad / (1 - 0.9), 0.001 * p.grad**2 / (1 - 0.999)
        shrunk = p.detach() * (1 - 0.01 * decay * (id(p) in decayed))
        want[name] = shrunk - 0.01 * m / (v.sqrt() + 1e-8)
    for optimizer in make_optimizers(model, config):
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=0, atol=1e-12)


def test_decayed_parameters() -> None:
    model = TransformerXL(small_config(untie_r=True, cutoffs=(4, 9), div_val=2))
    groups = make_optimizers(model, TrainConfig(weight_decay=0.1))[0].param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)].split(".", 2)[-1] for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {f"attention.{x}.weight" for x in ("qkv", "r", "out")} | {
        f"feed_forward.{n}.weight" for n in (0, 3)
    }
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_updates_q_k_and_v_separately() -> None:
    model = with_gradients()
    alone = with_gradients()
    config = TrainConfig(lr=0.01, optimizer="muon", weight_decay=0.1)
    optimizers = make_optimizers(model, config)
    for optimizer in optimizers:
        optimizer.step()
    matrix, gradient = (
        x.detach() for x in (alone.layers[0].attention.qkv.weight, alone.layers[0].attention.qkv.weight.grad)
    )
    want = []
    for rows in range(0, 48, 16):
        part = torch.nn.Parameter(matrix[rows : rows + 16].clone())
        part.grad = gradient[rows : rows + 16].clone()
        torch.optim.Muon([part], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
        want.append(part.detach())
    torch.testing.assert_close(model.layers[0].attention.qkv.weight.detach(), torch.cat(want))
    whole = torch.nn.Parameter(matrix.clone())
    whole.grad = gradient.clone()
    torch.optim.Muon([whole], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert not torch.allclose(whole.detach(), torch.cat(want))
    torch.optim.Adam(alone.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.embedding.tables[0].detach(), alone.embedding.tables[0].detach())
    assert model.layers[0].attention.qkv.weight.grad is not None, "gradients stay where they were"


def test_no_muon_in_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(TxlError, match=r"optimizer 'muon' needs torch 2.9 or newer, this is "):
        make_optimizers(small_model(), TrainConfig(optimizer="muon"))
