"""Values of another width than queries and keys."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from txl_kernels.forms.form import Form

OF_KEYS = ("q", "k", "r", "content_bias", "position_bias")


def common_width(form: Form) -> Form:
    """The narrower tensors filled up with zeros, which add nothing to a score or a value."""
    more = form.q.size(3) - form.v.size(3)
    if not more:
        return form

    def filled(x: Any) -> Any:
        return F.pad(x, (0, abs(more))) if isinstance(x, Tensor) else x

    k_mem, v_mem = (None, None) if form.memory is None else form.memory
    if more > 0:
        form, v_mem = form._replace(v=filled(form.v)), filled(v_mem)
    else:
        form, k_mem = form._replace(**{name: filled(getattr(form, name)) for name in OF_KEYS}), filled(k_mem)
    return form if form.memory is None else form._replace(memory=(k_mem, v_mem))
