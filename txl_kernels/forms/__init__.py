"""Forms of the attention that the kernels do not know, each told to them in terms they know.

`attend` takes one apart, form by form; what is left is a plain call. So every backend has them all,
exactly, and the kernels one formula.
"""

from txl_kernels.forms.attend import attend
from txl_kernels.forms.chunks import Chunk
from txl_kernels.forms.form import Form, is_special

__all__ = ["Chunk", "Form", "attend", "is_special"]
