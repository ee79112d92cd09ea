"""Tensors whose values cannot be read: those that torch.func.vmap maps over, those on "meta", and
fake ones."""

import inkling_models
import pytest
import small_models
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap

from txl_kernels.integrations import accelerate


@pytest.mark.parametrize("masked", [False, True])
def test_ensemble_of_stacked_parameters(masked: bool) -> None:
    models = [small_models.model_of("XLNet", seed) for seed in (0, 1)]
    tokens, mask = inkling_models.TOKENS, inkling_models.LEFT
    given = {"attention_mask": mask} if masked else {}
    with torch.no_grad():
        want = torch.stack([m(tokens, **given).logits for m in models])
    reports = [accelerate(m, strict=True) for m in models]
    parameters, buffers = stack_module_state(models)
    with torch.no_grad():
        found = vmap(lambda p, b: functional_call(models[0], (p, b), (tokens,), given).logits)(parameters, buffers)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not reports[0].fallbacks


def test_gradients_of_each_sample() -> None:
    """With a mask for each: the original answers, and gives those of a call for each sample."""
    model = small_models.model_of("Parakeet")
    frames, masks = small_models.arguments_of("Parakeet").values()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
        named = {"input_features": x[None], "attention_mask": mask[None]}
        states: Tensor = functional_call(model, p, (), named).last_hidden_state
        return states[:, :2].square().sum()

    rows = range(len(frames))
    want = [grad(loss)(parameters, frames[n], masks[n]) for n in rows]
    report = accelerate(model, strict=True)
    found = vmap(grad(loss), (None, 0, 0))(parameters, frames, masks)
    assert report.fallbacks == {"a mask that torch.func.vmap maps over": 2}
    largest = max(float(g.abs().max()) for g in want[0].values())
    for name in found:
        for n in rows:
            assert float((found[name][n] - want[n][name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("name", ["XLNet", "Parakeet", "T5", "w2v-BERT relative_key", "Inkling"])
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes(where: str, name: str, masked: bool) -> None:
    """On "meta" the original gives them, of fake tensors the operator's fake kernel."""
    arguments = small_models.arguments_of("T5" if name == "Inkling" else name)
    if not masked:
        del arguments["attention_mask"]
    device = torch.device("meta" if where == "meta" else "cpu")
    mode = device if where == "meta" else FakeTensorMode(allow_non_fake_inputs=True)

    def output(accelerated: bool) -> tuple[Tensor, dict[str, int]]:
        with device:
            if name == "Inkling":
                model = inkling_models.model_of(name, mlp_layer_types=["dense"] * 4)  # experts read values
            else:
                model = small_models.model_of(name)
        report = accelerate(model, strict=True) if accelerated else None
        with mode, torch.no_grad():
            found = model(**{key: x.to(device) for key, x in arguments.items()})[0]
        return found, {} if report is None else report.fallbacks

    try:
        want, _ = output(False)
    except RuntimeError as error:
        pytest.skip(f"the original reads values: {error}")
    found, fallbacks = output(True)
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
    assert bool(fallbacks) == (where == "meta")
