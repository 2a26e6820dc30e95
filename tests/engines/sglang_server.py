"""Start a real SGLang server on a CPU that returns routes: python sglang_server.py MODEL PORT

SGLang has no package for CPUs, and its wheel asks for CUDA. Unpacked without dependencies beside
the Python of vLLM (the same transformers), with the small packages that it imports, it runs in
plain torch: compiled kernels, image packages and pinned memory are stand-ins here; a float32 server
without AMX calls none of them. The server's own processes import this file again.

    pip install --no-deps --target DIR sglang==0.5.23 orjson msgspec uvloop ipython
        traitlets stack_data executing pure_eval asttokens pexpect ptyprocess wcwidth
        prompt_toolkit pygments matplotlib_inline jedi parso decorator outlines==0.1.11 lark
        nest_asyncio cloudpickle diskcache referencing airportsdata pycountry nvidia-ml-py
        openai_harmony==0.0.4 zstandard torch_memory_saver xxhash datasets pandas dill
        multiprocess pyarrow apache-tvm-ffi kernels pillow watchfiles smg-grpc-servicer
        deepseek-recipe tml-renderers torchao soundfile easydict
"""

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import types

import torch

STAND_INS = ("torchvision", "gguf", "sgl_kernel")
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class AnyClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class AnyModule(types.ModuleType):
    """A module that has every name."""

    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are not there."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(StandIns())
done = staticmethod(lambda *_: 0)
torch.cuda.cudart = lambda: type(
    "Runtime", (), {"cudaHostRegister": done, "cudaHostUnregister": done}
)

if __name__ == "__main__":
    model, port = sys.argv[1:3]
    options = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    options += [
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
        "--skip-server-warmup",
    ]
    options += ["--disable-overlap-schedule", "--mem-fraction-static", "0.1"]
    options += ["--max-total-tokens", "4096", "--enable-return-routed-experts"]
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    multiprocessing.set_start_method("spawn", force=True)
    address = ["--host", "127.0.0.1", "--port", port]
    run_server(prepare_server_args(["--model-path", model, *address, *options]))
