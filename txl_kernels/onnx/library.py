"""The operator `txl::RelAttention` for ONNX Runtime: its inputs, and its file."""

from txl_kernels.backends import cpu, native_modules

# In the operator's order (csrc/cpu/onnx); q, k and v alone are needed.
INPUTS = (
    "q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "start", "end", "q_pos", "r_bias", "sink",
)  # fmt: skip


def library() -> str:
    """Return the path of the library for `SessionOptions.register_custom_ops_library`.

    Raises:
        RuntimeError: this copy of the package does not have it; the message says what is missing.
    """
    if cpu.native.file is None:
        raise RuntimeError(f"the operator for ONNX Runtime needs the C++ kernels: {cpu.native.why_not_loaded}")
    kernels = native_modules.library_of("_native", cpu.native.file)
    file = kernels.with_name(f"libtxl_onnx{kernels.suffix}")
    if not file.is_file():
        raise RuntimeError(f"the operator for ONNX Runtime is missing, {file}; install the package again")
    return str(file)
