"""Start a real vLLM server on a CPU that returns routes: python vllm_server.py MODEL PORT

Runs in vLLM's own Python. Routes need its second model runner, which needs Triton; on a CPU that
starts only with interpreted kernels and a stand-in for the backend.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"
from triton import backends  # reads the variable


class Driver:
    """A backend that is there."""

    @staticmethod
    def is_active():
        return True


backends.backends["cpu"] = backends.Backend(None, Driver)  # also in the engine's own process

if __name__ == "__main__":
    model, port = sys.argv[1:3]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    options += ["--enable-return-routed-experts", "--enable-scale-out", "--max-num-seqs", "16"]
    address = ["--host", "127.0.0.1", "--port", port]
    sys.argv = ["api_server", "--model", model, *address, *options]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
