"""Lets stock SGLang start without a GPU. Installed into its virtual environment by `scripts/install_sglang_cpu.sh`,
imported by Python at start, active only where SGLANG_USE_CPU_ENGINE=1.

Two things stand in the way: kernels that want libcuda.so.1 to load, and a memory saver that hooks CUDA's allocator.
The first is given a stub; the second becomes a saver that saves nothing, so that sleep and wake can be called.
"""

import contextlib
import ctypes
import importlib.machinery
import os
import sys
import types


class MemorySaver:
    """The calls that SGLang makes to torch_memory_saver, without effect."""

    enabled = True
    hook_mode = "torch"

    def region(self, *args, **kwargs):
        return contextlib.nullcontext()

    cuda_graph = disable = region

    def pause(self, *args, **kwargs):
        pass

    resume = pause


def first_use(name):
    """The saver, which SGLang asks for once it has imported torch: its weight checker synchronizes a CUDA device, also
    where there is none."""
    if name != "torch_memory_saver":
        raise AttributeError(name)
    import torch

    torch.cuda.synchronize = lambda device=None: None
    return MemorySaver()


def install():
    # Loaded once by path, the stub's soname serves every later library that names libcuda.so.1.
    ctypes.CDLL(os.path.join(sys.prefix, "lib", "libcuda_stub", "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    module = types.ModuleType("torch_memory_saver")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_memory_saver", None)
    module.__getattr__ = first_use
    module.TorchMemorySaver = MemorySaver
    module.configure_subprocess = MemorySaver().region
    sys.modules["torch_memory_saver"] = module


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    install()
