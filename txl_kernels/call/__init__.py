"""One call of `rel_attention`: its fields, which keys its queries see, which weights it drops."""

from txl_kernels.call.fields import Call

__all__ = ["Call"]
